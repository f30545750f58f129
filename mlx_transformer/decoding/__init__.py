"""Decoding: greedy search, beam search and sampling, from source ids to output ids, for every runtime."""
