"""Samples of mds."""
