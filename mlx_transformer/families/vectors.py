"""Decoders in folders of sentence-transformers, e.g. Qwen3-Embedding and EmbeddingGemma: as encoders of ours, and back.

Such a model has no classifier. Its attention is causal, or with `use_bidirectional_attention` to both sides, where a
window of W keys reaches W // 2 positions to each: Gemma 3 alone says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import VOCABULARY, Head
from mlx_transformer.system.errors import UserError

from .engine import Family, Published, differences, exported
from .gemma import GEMMA3
from .keys import Values
from .table import family_of

HEAD = Head(kind="hidden")

TWO_SIDED = "use_bidirectional_attention"


def is_two_sided(source: Published) -> bool:
    """Whether a decoder's attention isn't causal; other families than Gemma 3 refuse the key or don't know it."""
    return bool(source.config.get("model_type") == GEMMA3.model_type and source.config.get(TWO_SIDED))


def without_classifier(source: Published) -> Published:
    """The decoder as its family reads it: it may have a classifier, or lack the one that its config.json names."""
    tensors = {name: array for name, array in source.tensors.items() if not name.startswith("lm_head.")}
    config = {**source.config, "tie_word_embeddings": True}
    if is_two_sided(source):
        del config[TWO_SIDED]
    return dataclasses.replace(source, config=config, tensors=tensors)


def as_encoder(
    config: TransformerConfig, weights: Mapping[str, Any], causal: bool
) -> tuple[TransformerConfig, dict[str, Any]]:
    """The same network as an encoder."""
    fields = dict(architecture="encoder", encoder_layers=config.decoder_layers, decoder_layers=0, causal=causal)
    fields |= dict(head=HEAD, tie_embeddings="all", output_bias=False, logit_scale=None, logit_cap=None)
    fields |= {} if causal else _windows(config, lambda width: width // 2)
    stacks = {"decoder": "encoder", "target_embedding": "embedding"}
    return dataclasses.replace(config, **fields), _renamed(weights, stacks)


def as_decoder(config: TransformerConfig, chosen: Family | None = None) -> tuple[Family, TransformerConfig] | None:
    """The family that has an encoder as its decoder, and the decoder's config; None if `chosen`, or any, has none."""
    if config.architecture != "encoder" or config.head != HEAD:
        return None
    fields = dict(architecture="decoder", decoder_layers=config.encoder_layers, encoder_layers=0, causal=False)
    fields |= dict(head=VOCABULARY, tie_embeddings="target-output")
    fields |= {} if config.causal else _windows(config, lambda width: 2 * width)
    try:
        decoder = dataclasses.replace(config, **fields)
    except UserError:  # of positions or norms that only encoders have
        return None
    family = chosen or (family_of(decoder) if config.causal else GEMMA3)
    fits = family.architecture_of_ours == "decoder" and (config.causal or family is GEMMA3)
    return (family, decoder) if fits and not differences(family, decoder) else None


def exported_vectors(
    family: Family, decoder: TransformerConfig, weights: Mapping[str, Any], where: Path, causal: bool
) -> tuple[Values, dict[str, Any]]:
    """config.json and tensors of the class without a classifier, whose names have no prefix. weights: the encoder's."""
    named = _renamed(weights, {"encoder": "decoder", "embedding": "target_embedding"})
    config, tensors = exported(family, decoder, named.items(), where)
    base = re.sub("(ForCausalLM|LMHeadModel)$", "TextModel" if family is GEMMA3 else "Model", family.architecture)
    config = {**config, "architectures": [base], **({} if causal else {TWO_SIDED: True})}
    return config, {name.removeprefix(family.prefix): array for name, array in tensors.items()}


def _windows(config: TransformerConfig, change: Callable[[int], int]) -> Values:
    """The fields of windows with other widths."""

    def changed(width: int | None) -> int | None:
        return None if width is None else change(width)

    pattern = [
        {**layer, "window": changed(layer["window"])} if "window" in layer else layer for layer in config.layer_pattern
    ]
    return dict(window=changed(config.window), layer_pattern=pattern)


def _renamed(weights: Mapping[str, Any], stacks: Mapping[str, str]) -> dict[str, Any]:
    parts = ((name.partition("."), array) for name, array in weights.items())
    return {f"{stacks.get(first, first)}.{rest}": array for (first, _, rest), array in parts}
