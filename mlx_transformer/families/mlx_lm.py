"""Differences between mlx-lm (0.32.2) and `transformers`, found from a folder's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .keys import Values

WINDOWS = ("llama", "smollm3", "gemma3_text", "olmo3")
"""Model types for which mlx-lm has windows, in the layers given by layer_types (Gemma 3: sliding_window_pattern)."""
ACTIVATIONS = {"gpt2": "gelu_new", "gemma": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh"}
ACTIVATIONS |= {"gemma3_text": "gelu_pytorch_tanh"}
"""{model type: mlx-lm's activation, if it isn't silu}"""


FULL = "full_attention"


def keys_of_mlx_lm(config: Mapping[str, Any]) -> Values:
    """Keys to add to a config.json because only mlx-lm reads them."""
    layers = config.get("layer_types") or []
    periodic = config.get("model_type") == "gemma3_text" and FULL in layers
    return {"sliding_window_pattern": layers.index(FULL) + 1} if periodic else {}


def unlike_mlx_lm(config: Values) -> list[str]:
    """Reasons why mlx-lm's outputs for a config.json differ from those of `transformers`, e.g. ["it knows no
    sliding_window"]; [] if they don't.
    """
    kind = str(config.get("model_type"))
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    turned = rope.get("rope_type", rope.get("type"))
    names = ("activation_function", "hidden_activation", "hidden_act")
    act = next((config[name] for name in names if config.get(name)), "silu")
    width, half = config.get("hidden_size", 1), config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    layers = config.get("layer_types") or (["sliding_attention"] if slides else [])
    usual = 1 + 0.1 * math.log(max(1, rope.get("factor") or 1))
    checks = {
        f"it has {ACTIVATIONS.get(kind, 'silu')} for {act}": act != ACTIVATIONS.get(kind, "silu"),
        "it knows no sliding_window": kind not in WINDOWS and bool(slides) and "sliding_attention" in layers,
        "it can't load layers that all have windows": kind in WINDOWS and slides and FULL not in layers,
        "its windows follow a period": kind == "gemma3_text"
        and any(
            (layer == FULL) != ((i + 1) % (layers.index(FULL) + 1) == 0)
            for i, layer in enumerate(layers)
            if FULL in layers
        ),
        "it ignores attention_factor and truncate of yarn": turned == "yarn"
        and not (rope.get("truncate", True) and math.isclose(rope.get("attention_factor") or usual, usual)),
        "its longrope has the long factors alone": turned == "longrope",
        "it can't load attention_bias": kind == "qwen3" and config.get("attention_bias"),
        "it scales attention and ties its classifier always": kind == "gpt2"
        and not (config.get("scale_attn_weights", True) and config.get("tie_word_embeddings", True)),
        "it can't load an n_inner other than 4 n_embd": kind == "gpt2"
        and config.get("n_inner") not in (None, 4 * config.get("n_embd", 0)),
        "it rounds the factor of embeddings to bfloat16": kind == "gemma3_text"
        and not half
        and not (width**0.5).is_integer(),
    }
    return [reason for reason, holds in checks.items() if holds]
