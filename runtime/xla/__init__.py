"""Scheduled graphs through XLA: one program of all devices, in which every device runs the local view."""
