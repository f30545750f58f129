"""The definition of a model, without MLX or ONNX: config, table of parameters, checkpoint, inputs, positions."""
