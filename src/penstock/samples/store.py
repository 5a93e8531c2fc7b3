"""A mounted store: what programs read samples from."""
