"""Precisions of a package (`table.py`), and the passes that turn float32 graphs into them."""
