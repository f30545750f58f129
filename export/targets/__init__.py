"""Targets: where a package is to run. A folder per target has its graphs and the code that runs them."""
