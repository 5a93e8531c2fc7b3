"""Samples of arrays."""
