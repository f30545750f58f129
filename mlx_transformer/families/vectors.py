"""Convert decoders that make text vectors, e.g. Qwen3-Embedding and EmbeddingGemma, to encoders and back.

Such a model has no classifier. Its attention is causal, or bidirectional with Gemma 3's `use_bidirectional_attention`;
then a window of W keys reaches W // 2 positions to each side.
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
    """Whether attention is bidirectional. Families other than Gemma 3 refuse the key or don't have it."""
    return bool(source.config.get("model_type") == GEMMA3.model_type and source.config.get(TWO_SIDED))


def without_classifier(source: Published) -> Published:
    """Return the decoder in its family's form: drop a classifier, and accept that a declared classifier is missing."""
    tensors = {name: array for name, array in source.tensors.items() if not name.startswith("lm_head.")}
    config = {**source.config, "tie_word_embeddings": True}
    if is_two_sided(source):
        del config[TWO_SIDED]
    return dataclasses.replace(source, config=config, tensors=tensors)


def as_encoder(
    config: TransformerConfig, weights: Mapping[str, Any], causal: bool
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return the same network as an encoder."""
    fields = dict(architecture="encoder", encoder_layers=config.decoder_layers, decoder_layers=0, causal=causal)
    fields |= dict(head=HEAD, tie_embeddings="all", output_bias=False, logit_scale=None, logit_cap=None)
    fields |= {} if causal else _windows(config, lambda width: width // 2)
    stacks = {"decoder": "encoder", "target_embedding": "embedding"}
    return dataclasses.replace(config, **fields), _renamed(weights, stacks)


def as_decoder(config: TransformerConfig, chosen: Family | None = None) -> tuple[Family, TransformerConfig] | None:
    """Return (family that can store the encoder as a decoder, the decoder's config); None if no family, or not
    `chosen`, can."""
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
    """Return config.json and tensors of the class without a classifier (no prefix in names). weights: the encoder's."""
    named = _renamed(weights, {"encoder": "decoder", "embedding": "target_embedding"})
    config, tensors = exported(family, decoder, named.items(), where)
    base = re.sub("(ForCausalLM|LMHeadModel)$", "TextModel" if family is GEMMA3 else "Model", family.architecture)
    config = {**config, "architectures": [base], **({} if causal else {TWO_SIDED: True})}
    return config, {name.removeprefix(family.prefix): array for name, array in tensors.items()}


def _windows(config: TransformerConfig, change: Callable[[int], int]) -> Values:
    """Return the window fields with changed widths."""

    def changed(width: int | None) -> int | None:
        return None if width is None else change(width)

    pattern = [
        {**layer, "window": changed(layer["window"])} if "window" in layer else layer for layer in config.layer_pattern
    ]
    return dict(window=changed(config.window), layer_pattern=pattern)


def _renamed(weights: Mapping[str, Any], stacks: Mapping[str, str]) -> dict[str, Any]:
    parts = ((name.partition("."), array) for name, array in weights.items())
    return {f"{stacks.get(first, first)}.{rest}": array for (first, _, rest), array in parts}
