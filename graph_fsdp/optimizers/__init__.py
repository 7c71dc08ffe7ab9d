"""Optimizers step over slices of the shard storage instead of over parameters."""
