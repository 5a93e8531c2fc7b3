"""Writing a store's files, so that packing can be resumed."""
