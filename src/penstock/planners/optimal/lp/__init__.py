"""A linear program over an iteration: how much of each period has which action, and a bound."""
