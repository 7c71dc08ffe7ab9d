"""Compute regions are cut and compiled here."""
