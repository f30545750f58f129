"""The network as ONNX graphs, file by file the twin of `mlx_transformer/nn`."""
