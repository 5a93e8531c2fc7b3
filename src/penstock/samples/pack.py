"""Packing a source into a store."""
