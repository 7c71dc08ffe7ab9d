"""The representation is what passes read and write: the dialect, graphs, records, specifications."""
