"""The checks beside the points of the network: structure, data files, gradients, free decoding."""
