"""What no command and no other module uses: published traces and demand paging, for benchmarks and tests."""
