"""The decoders of `golden_decoders/`, by their config: of each family several, with sizes that differ."""

from __future__ import annotations

GPT2 = dict(model_type="gpt2", vocab_size=48, n_embd=12, n_layer=2, n_head=3, n_positions=32)
GPT2 |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA = dict(model_type="llama", vocab_size=48, hidden_size=12, intermediate_size=18, num_hidden_layers=2)
LLAMA |= dict(num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=32)
LLAMA |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 6}

MODELS = {
    "gpt2": GPT2,
    "gpt2-wide": {**GPT2, "n_inner": 20, "activation_function": "gelu", "n_embd": 15, "n_head": 5, "n_layer": 3},
    "gpt2-unscaled": {**GPT2, "scale_attn_weights": False, "layer_norm_epsilon": 1e-3, "n_head": 1}
    | dict(activation_function="relu", tie_word_embeddings=False),
    "llama": LLAMA,
    "llama-biased": {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    | dict(rope_theta=500.0, num_key_value_heads=3, rms_norm_eps=1e-3),
    "llama-wide": {**LLAMA, "head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 18}
    | dict(num_hidden_layers=3, hidden_act="gelu"),
    "nemo": {**MISTRAL, "head_dim": 6, "rope_theta": 1000000.0},
    "mistral": {**MISTRAL, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 24},
    "mistral-tied": {**MISTRAL, "tie_word_embeddings": True, "num_hidden_layers": 1, "rms_norm_eps": 1e-2},
    "qwen3": QWEN3,
    "qwen3-tied": {**QWEN3, "tie_word_embeddings": True, "num_attention_heads": 5, "num_key_value_heads": 5}
    | dict(hidden_size=20, rope_theta=100.0),
    "qwen3-biased": {**QWEN3, "attention_bias": True, "head_dim": 8, "num_attention_heads": 4, "rms_norm_eps": 1e-2}
    | dict(num_key_value_heads=2, num_hidden_layers=3),
}
