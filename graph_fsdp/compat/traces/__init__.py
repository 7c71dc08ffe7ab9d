"""Dynamo and AOTAutograd trace a model with less work, and their private names are used here."""
