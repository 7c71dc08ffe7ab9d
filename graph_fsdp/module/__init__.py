"""What the user holds: the class of a compiled model, its units' methods, gradients and settings."""
