"""Search inside the graph: one ONNX file that takes a sentence's ids and returns those of its translations."""
