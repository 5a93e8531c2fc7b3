"""Commands on sample stores. Each returns an Answer; nothing is printed here."""
