"""A mounted store: its directory, and reading by name, by index and by batch."""
