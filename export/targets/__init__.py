"""The targets of a package: a folder each for the graphs and the code that runs them. `table.py` lists them."""
