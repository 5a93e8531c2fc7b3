"""What the papers claim, measured with real training, or simulated and named so."""
