"""From the relaxation's fractions to a plan: rounding, seeds, and a local search."""
