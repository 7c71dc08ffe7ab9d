"""Inductor compiles regions, builds kernels of several graphs together, and keeps them in its cache."""
