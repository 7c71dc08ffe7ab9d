"""CUDA graphs of compute regions."""
