"""Token ids in, token ids out: greedy, beam and sampling over a step function. Only `with_mlx` loads MLX."""
