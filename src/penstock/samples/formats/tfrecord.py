"""Samples of tfrecord."""
