"""The definition of a model: config, parameters, checkpoint, tokenizer. No MLX and no ONNX here."""
