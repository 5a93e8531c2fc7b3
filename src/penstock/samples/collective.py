"""Mounting with several processes."""
