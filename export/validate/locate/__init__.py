"""Where something is over budget: the operation at fault."""
