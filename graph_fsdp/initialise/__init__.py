"""Initial values come from the meta device's initialisation, files or the first rank."""
