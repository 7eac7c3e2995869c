"""Examples, in a clone: the tiny model and how it is trained."""
