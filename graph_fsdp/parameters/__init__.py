"""Sharded parameters: their storage, their placeholders, and what is set of them."""
