"""Packing a source into a store, so that it can be interrupted and resumed."""
