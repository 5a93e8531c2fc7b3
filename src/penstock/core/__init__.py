"""Pure values that pass between the stages, and the judge. No torch, no files but in `files`."""
