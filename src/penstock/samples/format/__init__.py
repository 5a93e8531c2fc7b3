"""What lies on disk: the files of a store, its manifest, and the encodings of samples."""
