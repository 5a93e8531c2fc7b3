"""Feeding a store to PyTorch, exactly resumable."""
