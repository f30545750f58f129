"""Qwen 2, 2.5 and 3 (Yang et al. 2024, 2025): Llama's network with biases of queries, keys and values, in Qwen 3 with
norms of queries and keys instead; the last layers may be local.
"""

from __future__ import annotations

from .decoder_keys import Layers, Rotary, Specials, Unread, head_width
from .llama import ACTIVATION, ATTENTION_BIAS, NO_BIAS, UNTIED, like_llama, sizes

LATER = Layers(lambda i, keys: i >= keys["max_window_layers"], switched=True, keys=(("max_window_layers", 28),))
"""Layers from max_window_layers on are local."""

QWEN2 = like_llama(
    *("Qwen2", "qwen2", "Qwen2ForCausalLM", *sizes(151936, 4096, 22016, 32, 32, 32, 32768, 1e-6), head_width()),
    *(ACTIVATION, Rotary(), LATER, UNTIED, Specials(), Unread()),
    ours={**NO_BIAS, "attention_bias": True, "attention_output_bias": False},
)
QWEN3 = like_llama(
    *("Qwen3", "qwen3", "Qwen3ForCausalLM", *sizes(151936, 4096, 22016, 32, 32, 32, 32768, 1e-6), head_width(128)),
    *(ACTIVATION, Rotary(), LATER, ATTENTION_BIAS, UNTIED, Specials(), Unread()),
    ours={**NO_BIAS, "query_key_norm": True},
)
