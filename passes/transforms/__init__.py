"""This folder has the passes, one per file, each with its arithmetic beside it."""
