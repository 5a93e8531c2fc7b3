"""The sample store: random access to millions of small samples at the speed of large reads (DLFS)."""
