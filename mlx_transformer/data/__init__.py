"""Parallel text, the built-in corpora and token batches. NumPy only: no MLX, no ONNX."""
