"""Where values come from: the meta device, initialisations, files, random numbers."""
