"""From the fractions of the linear program to a plan: rounding, seeds, and a local search."""
