"""What the policies that work through a list of tensors share."""
