"""A linear programme over an iteration: how much should go which way, and a bound that is proven."""
