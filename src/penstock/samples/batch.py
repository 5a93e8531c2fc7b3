"""Samples that were read together."""
