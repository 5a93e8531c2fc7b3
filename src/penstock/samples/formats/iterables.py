"""Samples of iterables."""
