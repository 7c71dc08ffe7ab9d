"""Equal layers are traced once."""
