"""The passes, one per file, and the arithmetic of each beside it."""
