"""The network as graphs of ONNX, file by file the twin of `mlx_transformer/nn`."""
