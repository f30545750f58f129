"""The rules between fields of a config that are right by themselves."""

from __future__ import annotations

from typing import Any

from .heads import VOCABULARY

SINUSOIDS = ("sinusoidal", "sinusoidal_halves", "sinusoidal_concat")
"""Positions that are added to the embeddings and not learned."""
RELATIVE = ("relative", "relative_layers")
"""Positions that add a number to each score: of one table a stack, or of one a layer."""


def relations(c: Any) -> list[str]:
    """Return everything that is wrong with a `TransformerConfig` whose fields are sound."""
    problems: list[str] = []

    def check(holds: bool, message: str) -> None:
        if not holds:
            problems.append(message)

    check(c.heads % c.key_value_heads == 0, f"heads={c.heads} is not a multiple of key_value_heads={c.key_value_heads}")
    for id_name in ("pad_id", "bos_id", "eos_id"):
        smallest = min(c.vocab_size, c.source_vocab_size) if c.architecture == "encoder-decoder" else c.vocab_size
        check(
            getattr(c, id_name) < smallest, f"{id_name}={getattr(c, id_name)} is outside the vocabulary of {smallest}"
        )
    # Marian starts its decoder with the padding token, BART with the end.
    check(c.eos_id != c.pad_id, "eos_id must differ from pad_id")
    check(c.positions != "rotary" or c.d_k % 2 == 0, f"positions='rotary' turns pairs: d_k={c.d_k} must be even")
    if c.positions in RELATIVE:
        check(c.relative_buckets >= 4, f"relative_buckets={c.relative_buckets} must be at least 4")
        far = c.relative_distance > c.relative_buckets // 2
        check(
            far, f"relative_distance={c.relative_distance} must be over half of relative_buckets={c.relative_buckets}"
        )
    counted = not c.first_position or c.positions in SINUSOIDS
    check(counted, f"first_position={c.first_position} is of sinusoids, not of positions={c.positions!r}")
    if c.positions in SINUSOIDS:
        check(c.d_model % 2 == 0, f"positions={c.positions!r} needs an even d_model, not {c.d_model}")
    if c.positions == "sinusoidal_concat":
        check(c.d_model >= 4, "positions='sinusoidal_concat' divides by d_model/2 - 1: d_model must be at least 4")
    check(c.norm_bias or c.norm == "layernorm", f"norm_bias is of layernorm, not of norm={c.norm!r}")
    local = c.window is not None or any("window" in layer for layer in c.layer_pattern)
    only = f"need architecture='encoder', not {c.architecture!r}"
    check(c.architecture == "encoder" or (c.first_norm and not local), f"window and first_norm=False {only}")
    check(c.first_norm or c.norm_placement == "pre", "first_norm: norms behind the sub-layers are in every layer")
    check(not (c.positions in RELATIVE and local), f"positions={c.positions!r} has no window: every key is seen")
    shared = c.positions == "relative" and any("heads" in layer for layer in c.layer_pattern)
    check(not shared, "layer_pattern: heads can't differ with positions='relative', whose table all layers share")
    based = [layer.get("positions", c.positions) for layer in c.layer_pattern if "rotary_base" in layer]
    check({*based} <= {"rotary"}, f"layer_pattern: rotary_base needs positions='rotary', not {c.positions!r}")
    if c.architecture == "encoder-decoder":
        check(c.encoder_layers > 0, "an encoder-decoder needs encoder_layers of at least 1")
        check(c.decoder_layers > 0, "an encoder-decoder needs decoder_layers of at least 1")
        fits = not c.one_embedding or c.source_vocab_size == c.vocab_size
        check(
            fits,
            f"tie_embeddings={c.tie_embeddings!r} needs source_vocab_size={c.source_vocab_size} equal to vocab_size",
        )
    else:
        same = c.source_vocab_size == c.vocab_size
        check(same, f"source_vocab_size: an architecture of {c.architecture!r} alone has one vocabulary")
    check(c.head == VOCABULARY or c.architecture == "encoder", f"head: of an encoder alone, not of {c.architecture!r}")
    if c.head.kind != "vocabulary":
        tied = c.tie_embeddings == "all"
        check(tied, f"tie_embeddings={c.tie_embeddings!r}: a head of kind {c.head.kind!r} multiplies by no embedding")
    if not c.head.classifies:
        bare = not c.output_bias and c.logit_scale is None and c.logit_cap is None
        names = "output_bias, logit_scale and logit_cap"
        check(bare, f"{names} are of a classifier, which a head of kind {c.head.kind!r} lacks")
    only = f"token_types={c.token_types}: an encoder alone tells kinds of tokens apart, not {c.architecture!r}"
    check(not c.token_types or c.architecture == "encoder", only)
    if c.recurrent:
        alone = f"decoder_self_attention='ssru': only an encoder-decoder has it, not {c.architecture!r}"
        check(c.architecture == "encoder-decoder", alone)
        within = f"positions={c.positions!r} act in self-attention, which a decoder with decoder_self_attention='ssru'"
        check(c.positions not in ("rotary", *RELATIVE), f"{within} lacks: choose others, or none")
    if c.architecture == "encoder":
        check(c.encoder_layers > 0, "an encoder needs encoder_layers of at least 1")
        check(c.decoder_layers == 0, f"decoder_layers={c.decoder_layers}: an encoder has no decoder (give 0)")
        possible = c.tie_embeddings in ("all", "none")
        check(
            possible,
            f"tie_embeddings={c.tie_embeddings!r}: an encoder has no target embedding (use 'all' or 'none')",
        )
    if c.architecture == "decoder":
        check(c.decoder_layers > 0, "a decoder needs decoder_layers of at least 1")
        check(c.encoder_layers == 0, f"encoder_layers={c.encoder_layers}: a decoder has no encoder (give 0)")
        check(
            not c.one_embedding,
            f"tie_embeddings={c.tie_embeddings!r}: a decoder has no source embedding (use 'target-output' or 'none')",
        )
    return problems
