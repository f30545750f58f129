"""A graph in the making: inputs, outputs and taps of all targets, and what onnx_ir is kept from loading."""
