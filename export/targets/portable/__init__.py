"""Target `portable`: standard operators, any shape. Targets without graphs of their own, e.g. `web`, use these too."""
