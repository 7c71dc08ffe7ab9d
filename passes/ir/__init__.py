"""What passes read and write: the dialect, graphs, records, specifications."""
