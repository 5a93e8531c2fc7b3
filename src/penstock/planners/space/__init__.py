"""Addresses on the device: who occupies them when, and moDNN's walk through a managed space."""
