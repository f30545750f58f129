"""HTML pages: the report of training runs, and the comparison of two models on the same text."""
