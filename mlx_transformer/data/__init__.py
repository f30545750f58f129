"""Parallel text, the built-in CLDR corpus and token batches. NumPy and `babel` only: no MLX, no ONNX."""
