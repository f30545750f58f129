"""A checkpoint opened and run with MLX."""
