"""Pure values that pass between the stages, and the plan checker. No torch, no files but in `files`."""
