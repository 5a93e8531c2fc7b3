"""The files of one store, mapped and verified."""
