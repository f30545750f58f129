"""A page about one sentence: what a Transformer reads, attends to, predicts and writes, from a real forward pass."""
