"""Target `cpu`: ONNX Runtime's fused operators; activations are rows of tokens, without padding."""
