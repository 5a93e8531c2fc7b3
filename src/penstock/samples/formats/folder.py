"""Samples of folder."""
