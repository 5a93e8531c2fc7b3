"""What no command and no other module uses: studies of the papers, for benchmarks and tests only."""
