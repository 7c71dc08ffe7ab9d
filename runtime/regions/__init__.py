"""Compute regions, and their compilation."""
