"""Fields to the bytes of a sample and back."""
