"""What ranks tell each other: agreements, order, failures."""
