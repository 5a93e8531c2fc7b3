"""Which I/O path each transfer takes: learned from what transfers cost on this machine."""
