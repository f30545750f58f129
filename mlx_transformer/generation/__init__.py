"""What a model does with text: translate, complete, embed, classify, tag, answer, fill and rerank.

`verbs.py` puts these on a model as methods. The search itself, from token ids to token ids, is the room `decoding`.
Nothing here loads MLX.
"""
