"""Samples of webdataset."""
