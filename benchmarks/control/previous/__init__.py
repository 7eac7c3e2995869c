"""The controller before: removed once it has been compared with."""
