"""One page about one training run or several: curves side by side, samples over time, what they ran on."""
