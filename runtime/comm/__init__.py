"""Collectives run on process groups here, and copies go between devices."""
