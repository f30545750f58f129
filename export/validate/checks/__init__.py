"""What is checked beside the points of the network: structure, gradients, free decoding."""
