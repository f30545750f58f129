"""Names: where each of our parameters stands among those of `transformers`, and in which order its channels are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ties = tuple[bool, bool]
"""(share_encoder_decoder_embeddings, tie_word_embeddings) of config.json."""

# Our module within a layer: (theirs, the side of it that is d_model wide). Attention biases lie on the other side.
READS, WRITES, NORM = "reads", "writes", "norm"
LAYER = {
    "self_attention.query_proj": ("self_attn.q_proj", READS),
    "self_attention.key_proj": ("self_attn.k_proj", READS),
    "self_attention.value_proj": ("self_attn.v_proj", READS),
    "self_attention.output_proj": ("self_attn.out_proj", WRITES),
    "self_attention_norm": ("self_attn_layer_norm", NORM),
    "cross_attention.query_proj": ("encoder_attn.q_proj", READS),
    "cross_attention.key_proj": ("encoder_attn.k_proj", READS),
    "cross_attention.value_proj": ("encoder_attn.v_proj", READS),
    "cross_attention.output_proj": ("encoder_attn.out_proj", WRITES),
    "cross_attention_norm": ("encoder_attn_layer_norm", NORM),
    "feed_forward.up_proj": ("fc1", READS),
    "feed_forward.down_proj": ("fc2", WRITES),
    "feed_forward_norm": ("final_layer_norm", NORM),
}
SHARED, LM_HEAD = "model.shared.weight", "lm_head.weight"
ENCODER, DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
FINAL_NORM = "layer_norm"  # behind a stack of pre-norm layers
BIAS = "final_logits_bias"  # (1, V)
# {our matrix: the names it may go by, the one to be written first}
MATRICES: dict[Ties, dict[str, tuple[str, ...]]] = {
    (True, True): {"embedding.weight": (SHARED, ENCODER, DECODER, LM_HEAD)},
    (False, True): {"source_embedding.weight": (ENCODER,), "target_embedding.weight": (DECODER, LM_HEAD)},
    (False, False): {
        "source_embedding.weight": (ENCODER,),
        "target_embedding.weight": (DECODER,),
        "output_proj.weight": (LM_HEAD,),
    },
    # Which we don't have: both embeddings are stored.
    (True, False): {
        "source_embedding.weight": (SHARED, ENCODER, DECODER),
        "target_embedding.weight": (SHARED, ENCODER, DECODER),
        "output_proj.weight": (LM_HEAD,),
    },
}
TIES = {(True, True): "all", (False, True): "target-output", (False, False): "none", (True, False): "none"}


def channels(d_model: int) -> NDArray[np.intp]:
    """CHANNELS: which of our channels each of theirs is (d_model,)."""
    return np.r_[0:d_model:2, 1:d_model:2]


def their_names(name: str, ties: Ties) -> tuple[tuple[str, ...], str]:
    """Their names for our parameter, the first to be written, and the side of it that is d_model wide."""
    if name == "output_proj.bias":
        return (BIAS,), READS
    if name in MATRICES[ties]:
        return MATRICES[ties][name], READS
    side, _, rest = name.partition(".")
    module, _, parameter = rest.rpartition(".")
    if module == "norm":
        return (f"model.{side}.{FINAL_NORM}.{parameter}",), NORM
    _, i, module = module.split(".", 2)  # layers.0.feed_forward.up_proj
    their_module, wide = LAYER[module]
    return (f"model.{side}.layers.{i}.{their_module}.{parameter}",), wide


def permuted(array: NDArray, side: str, order: NDArray[np.intp]) -> NDArray:
    """A weight (out, in) or a bias (out,) with the channels of its d_model wide side in another order."""
    if side != READS:
        return array[order]
    return array[:, order] if array.ndim == 2 else array
