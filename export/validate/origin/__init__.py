"""The network that a checkpoint was imported from, run by its own code or read by a path of its own, in float64."""
