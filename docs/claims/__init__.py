"""Claims about the Transformer, row by row: the claim, its formula, its numbers, the code, the test, the figure."""
