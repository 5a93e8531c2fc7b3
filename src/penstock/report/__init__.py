"""What a run leaves behind, and pictures of it."""
