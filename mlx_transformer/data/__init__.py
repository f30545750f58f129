"""Read training text, e.g. parallel text and built-in corpora, and cut it into batches. NumPy only: no MLX, no ONNX."""
