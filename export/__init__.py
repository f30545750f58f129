"""The ONNX side: NumPy and onnx, never MLX."""
