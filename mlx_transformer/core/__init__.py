"""What a model is: config, parameters, checkpoint, tokenizer. No MLX and no ONNX here."""
