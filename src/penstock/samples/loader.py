"""Batches for training, from a store."""
