"""Pages about training runs, and about two models on the same text."""
