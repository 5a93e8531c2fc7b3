"""Sources of several files."""
