"""Analyses say what is known of a graph before it runs: cost, memory, lifetimes. They change nothing."""
