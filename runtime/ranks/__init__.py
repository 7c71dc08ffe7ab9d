"""Ranks tell each other what they agree on, in which order they run programs, and why they fail."""
