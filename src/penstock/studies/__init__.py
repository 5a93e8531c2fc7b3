"""What no command and no other module uses: published results and devices, for benchmarks and tests only."""
