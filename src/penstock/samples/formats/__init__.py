"""What can be packed, each a file: adding one takes a file and a line in FORMATS."""
