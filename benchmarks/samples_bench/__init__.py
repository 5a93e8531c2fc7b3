"""Ways to read samples in random order, side by side: the parts of benchmarks/samples.py."""
