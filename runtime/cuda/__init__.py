"""CUDA graphs of compute regions are captured and replayed here."""
