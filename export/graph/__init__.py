"""Building, changing and reading graphs, for every target and pass."""
