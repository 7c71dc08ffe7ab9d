"""Dynamo traces one of a model's equal layers, and copies serve the others."""
