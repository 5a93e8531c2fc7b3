"""The way to SSD: spill space in extents, and the transports that move bytes to it and back."""
