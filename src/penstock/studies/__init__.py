"""What reproduces published results: for benchmarks and tests. No part of the library imports it."""
