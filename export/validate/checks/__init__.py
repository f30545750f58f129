"""The checks of a comparison: weights, structure, graphs, files, integers, gradients, free decoding."""
