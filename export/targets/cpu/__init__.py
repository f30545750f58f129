"""Target `cpu`: ONNX Runtime's fused operators, rows of a batch at positions of their own."""
