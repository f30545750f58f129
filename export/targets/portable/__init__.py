"""Target `portable`, and all that need no graphs of their own: standard operators, any shape."""
