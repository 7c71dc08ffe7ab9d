"""Collectives and copies."""
