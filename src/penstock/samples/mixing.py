"""How well an order mixes, as a number."""
