"""The user holds a compiled model, whose class, units' methods, gradients and settings are here."""
