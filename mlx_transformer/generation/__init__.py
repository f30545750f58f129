"""Token ids in, token ids out: greedy, beam and sampling over a step function. `verbs` puts them on a model.
Nothing here loads MLX; `runtime.decoding` does.
"""
