"""What is known of a graph before it runs: cost, memory, lifetimes. Changes nothing."""
