"""Lower precision: what there is (`table.py`) and the passes over graphs that make it."""
