"""penstock trains PyTorch models that do not fit in memory."""
