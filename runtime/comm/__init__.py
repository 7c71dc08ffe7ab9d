"""Collectives on process groups, and copies between devices."""
