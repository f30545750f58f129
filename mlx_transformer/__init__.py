"""Train a Transformer with MLX; importing this package loads no MLX."""
