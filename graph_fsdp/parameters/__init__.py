"""Sharded parameters have a storage, placeholders, and settings of their own."""
