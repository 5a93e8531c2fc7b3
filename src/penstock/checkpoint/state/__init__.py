"""States: how tensors, dicts and modules become entries of a file, and entries become them again."""
