"""Stores in S3, Google Cloud Storage, Azure, or behind HTTP, through a cache on this machine's disk."""
