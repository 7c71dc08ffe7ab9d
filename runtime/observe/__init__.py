"""Watching programs run: times, schedules, ranges."""
