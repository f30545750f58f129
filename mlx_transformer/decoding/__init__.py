"""Ids to ids: greedy, beam and sampled search over the logits of any runtime."""
