"""Rules between the fields of a `TransformerConfig`, e.g. heads must be a multiple of key_value_heads."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from mlx_transformer.system.errors import Text

from .heads import VOCABULARY

SINUSOIDS = ("sinusoidal", "sinusoidal_halves", "sinusoidal_concat")
"""Positions added to the embeddings, not learned."""
RELATIVE = ("relative", "relative_layers")
"""Positions that add a learned bias to each attention score, from one table per stack or per layer."""

SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low", "high", "length"),
    "yarn": ("factor", "length", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("short", "long", "length", "attention_factor"),
    "divisors": ("divisors",),
}
"""{kind of `rotary_scaling`: its other keys}, all of them needed; `core/positions.py` has the formulas."""
LISTS = ("short", "long", "divisors")
"""Keys of `rotary_scaling` that hold a number for each pair."""


def scaling_problems(table: Any) -> list[str]:
    """Check a `rotary_scaling` by itself; returns the problems."""
    if not isinstance(table, Mapping):
        return [f"rotary_scaling={table!r:.60} must be a table of fields"]
    if not table:
        return []
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in SCALINGS:
        return [f"rotary_scaling: kind={kind!r:.60} is not one of {', '.join(SCALINGS)}"]
    wanted = {"kind", *SCALINGS[kind]}
    problems = [f"rotary_scaling: {kind} needs {name}" for name in SCALINGS[kind] if name not in table]
    problems += [f"rotary_scaling: {kind} has no {name!r:.60}" for name in table if name not in wanted]
    for name in (each for each in SCALINGS[kind] if each in table):
        value = table[name]
        if name == "truncate":
            fits, expected = isinstance(value, bool), "true or false"
        elif name in LISTS:
            fits = isinstance(value, list | tuple) and all(map(_positive, value))
            expected = "a list of numbers above 0 and at most 1e12"
        elif name == "length":
            fits, expected = _positive(value) and value == int(value), "a whole number of at least 1 and at most 1e12"
        else:
            fits, expected = _positive(value), "a number above 0 and at most 1e12"
        problems += [] if fits else [f"rotary_scaling: {name}={value!r:.60} must be {expected}"]
    return problems


def _positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= 1e12


def relations(c: Any) -> list[str]:
    """Check the rules of a `TransformerConfig` whose fields are valid one by one; returns the problems.

    Messages are templates: `{heads}` becomes `heads=8` (`errors.Text`).
    """
    problems: list[str] = []

    def check(holds: bool, message: str, *values: Any) -> None:
        if not holds:
            problems.append(Text(message, *values, **vars(c)))

    check(c.heads % c.key_value_heads == 0, "{heads} is not a multiple of {key_value_heads}")
    for id_name in ("pad_id", "bos_id", "eos_id"):
        smallest = min(c.vocab_size, c.source_vocab_size) if c.architecture == "encoder-decoder" else c.vocab_size
        check(getattr(c, id_name) < smallest, f"{{{id_name}}} is outside the vocabulary of {smallest}")
    # bos_id may equal either: Marian's decoder starts with the padding token, BART's with the end token.
    check(c.eos_id != c.pad_id, "eos_id must differ from pad_id")
    if c.positions == "rotary":
        name = "d_k" if c.rotary_width is None else "rotary_width"
        check(c.turned % 2 == 0, f"{{positions!r}} turns pairs: {{{name}}} must be even")
        check(c.turned <= c.d_k, "{rotary_width} is wider than a head, {d_k}")
    scaling, pairs = c.rotary_scaling, c.turned // 2
    for name in (each for each in LISTS if each in scaling):
        count = "rotary_scaling: {} has {} numbers, needs one for each of {} pairs"
        check(len(scaling[name]) == pairs, count, name, len(scaling[name]), pairs)
    fits = scaling.get("kind") != "longrope" or c.architecture == "decoder"
    check(fits, "rotary_scaling: longrope is of a decoder alone, not of {!r}", c.architecture)
    if scaling.get("kind") == "llama3":
        low, high = scaling["low"], scaling["high"]
        check(low < high, "rotary_scaling: high={} must be more than low={}", high, low)
    check(scaling.get("kind") != "yarn" or c.rotary_base > 1, "rotary_scaling: yarn needs a base over 1: {rotary_base}")
    for name, unset in (("rotary_width", None), ("rotary_scaling", {})):
        fits = getattr(c, name) == unset or c.positions in ("rotary", "none")
        check(fits, f"{name} needs positions='rotary', not {{!r}}", c.positions)
    if c.positions in RELATIVE:
        check(c.relative_buckets >= 4, "{relative_buckets} must be at least 4")
        far = c.relative_distance > c.relative_buckets // 2
        check(far, "{relative_distance} must be over half of {relative_buckets}")
    counted = not c.first_position or c.positions in SINUSOIDS
    check(counted, "{first_position} needs sinusoidal positions, not {positions!r}")
    if c.positions in SINUSOIDS:
        check(c.d_model % 2 == 0, "{positions!r} needs an even width: {d_model}")
    if c.positions == "sinusoidal_concat":
        check(c.d_model >= 4, "{positions!r} divides by d_model/2 - 1: {d_model} must be at least 4")
    tables = [fields for fields in (vars(c), c.decoder, *c.layer_pattern) if isinstance(fields, Mapping)]
    capped = any(fields.get("score_cap") is not None for fields in tables)
    check(not capped or c.architecture != "encoder-decoder", "score_cap needs an encoder or a decoder alone")
    check(c.embedding_scale is None or c.scale_embeddings, "{embedding_scale} needs scale_embeddings")
    check(c.norm_bias or c.norm == "layernorm", "{norm_bias} needs layernorm, not {norm!r}")
    local = c.window is not None or any("window" in layer for layer in c.layer_pattern)
    alone = c.architecture in ("encoder", "decoder") or not local
    check(alone, "window is of an encoder or a decoder alone, not of {!r}", c.architecture)
    check(not c.causal or c.architecture == "encoder", "{causal} is of an encoder alone, not of {!r}", c.architecture)
    check(
        c.first_norm or c.architecture == "encoder",
        "{first_norm} needs architecture='encoder', not {!r}",
        c.architecture,
    )
    check(c.first_norm or c.norm_placement == "pre", "{first_norm}: norms behind the sub-layers are in every layer")
    check(not (c.positions in RELATIVE and local), "{positions!r} has no window: every key is seen")
    shared = c.positions == "relative" and any("heads" in layer for layer in c.layer_pattern)
    check(not shared, "layer_pattern: heads can't differ with {positions!r}, whose table all layers share")
    for name in ("rotary_base", "rotary_width", "rotary_scaling"):
        turned = {layer.get("positions", c.positions) for layer in c.layer_pattern if name in layer}
        check(turned <= {"rotary"}, f"layer_pattern: {name} needs positions='rotary', not {{!r}}", c.positions)
    if c.architecture == "encoder-decoder":
        check(c.encoder_layers > 0, "{encoder_layers}: an encoder-decoder needs at least 1")
        check(c.decoder_layers > 0, "{decoder_layers}: an encoder-decoder needs at least 1")
        fits = not c.one_embedding or c.source_vocab_size == c.vocab_size
        check(fits, "{tie_embeddings!r} needs vocabularies of one size: {source_vocab_size}, {vocab_size}")
    else:
        same = c.source_vocab_size == c.vocab_size
        check(same, "{source_vocab_size}: an architecture of {!r} alone has one vocabulary", c.architecture)
    check(c.head == VOCABULARY or c.architecture == "encoder", f"head: of an encoder alone, not of {c.architecture!r}")
    if c.head.kind != "vocabulary":
        tied = c.tie_embeddings == "all"
        check(tied, "{tie_embeddings!r}: a head of kind {!r} multiplies by no embedding", c.head.kind)
    if not c.head.classifies:
        bare = not c.output_bias and c.logit_scale is None and c.logit_cap is None
        names = "output_bias, logit_scale and logit_cap"
        check(bare, "{} are of a classifier, which a head of kind {!r} lacks", names, c.head.kind)
    only = "{token_types}: an encoder alone tells kinds of tokens apart, not {!r}"
    check(not c.token_types or c.architecture == "encoder", only, c.architecture)
    if c.recurrent:
        only = "{decoder_self_attention!r}: only an encoder-decoder has it, not {!r}"
        check(c.architecture == "encoder-decoder", only, c.architecture)
        within = "{positions!r} act in self-attention, which a decoder with {decoder_self_attention!r} lacks"
        check(c.positions not in ("rotary", *RELATIVE), f"{within}: choose others, or none")
    if c.architecture == "encoder":
        check(c.encoder_layers > 0, "{encoder_layers}: an encoder needs at least 1")
        check(c.decoder_layers == 0, "{decoder_layers}: an encoder has no decoder (give 0)")
        possible = c.tie_embeddings in ("all", "none")
        check(possible, "{tie_embeddings!r}: an encoder has no target embedding (use 'all' or 'none')")
    if c.architecture == "decoder":
        check(c.decoder_layers > 0, "{decoder_layers}: a decoder needs at least 1")
        check(c.encoder_layers == 0, "{encoder_layers}: a decoder has no encoder (give 0)")
        none = "{tie_embeddings!r}: a decoder has no source embedding (use 'target-output' or 'none')"
        check(not c.one_embedding, none)
    return problems
