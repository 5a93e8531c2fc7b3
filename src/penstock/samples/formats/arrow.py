"""Samples of arrow."""
