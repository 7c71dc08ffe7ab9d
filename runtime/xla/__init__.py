"""XLA runs a scheduled graph as one program of all devices, in which every device runs the local view."""
