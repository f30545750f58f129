"""The decoders of `golden_decoders/`, by their config: of each family several, with sizes that differ."""

from __future__ import annotations

GPT2 = dict(model_type="gpt2", vocab_size=48, n_embd=12, n_layer=2, n_head=3, n_positions=32)
GPT2 |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA = dict(model_type="llama", vocab_size=48, hidden_size=12, intermediate_size=18, num_hidden_layers=2)
LLAMA |= dict(num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=32)
LLAMA |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": None}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 6}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
HUNYUAN = {**LLAMA, "model_type": "hunyuan_v1_dense", "head_dim": 6}
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
SMOLLM3 = {**LLAMA, "model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}
PHI3 = {**LLAMA, "model_type": "phi3", "hidden_size": 24, "original_max_position_embeddings": 32}
LONG = dict(type="longrope", short_factor=[1.0, 1.5], long_factor=[3.0, 7.0])
GEMMA = {**LLAMA, "model_type": "gemma", "head_dim": 6, "num_attention_heads": 2}
GEMMA3 = {**GEMMA, "model_type": "gemma3_text", "sliding_window": 4, "num_hidden_layers": 3}
GEMMA3 |= dict(query_pre_attn_scalar=9, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
GEMMA2 = {**GEMMA, "model_type": "gemma2", "sliding_window": 4, "num_hidden_layers": 3, "query_pre_attn_scalar": 9}
GEMMA2 |= dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
OLMO2 = {**LLAMA, "model_type": "olmo2"}
GRANITE = {**LLAMA, "model_type": "granite", "attention_multiplier": 0.3, "residual_multiplier": 0.4}
GRANITE |= dict(embedding_multiplier=3.0, logits_scaling=0.7)

MODELS = {
    "gpt2": GPT2,
    "gpt2-wide": {**GPT2, "n_inner": 20, "activation_function": "gelu", "n_embd": 15, "n_head": 5, "n_layer": 3},
    "gpt2-unscaled": {**GPT2, "scale_attn_weights": False, "layer_norm_epsilon": 1e-3, "n_head": 1}
    | dict(activation_function="relu", tie_word_embeddings=False),
    "gpt2-numbered": {**GPT2, "scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "gpt2-numbered-alone": {**GPT2, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
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
    "llama3": {**LLAMA, "rope_scaling": LLAMA3, "head_dim": 8, "num_key_value_heads": 3, "rope_theta": 50.0},
    "llama-linear": {**LLAMA, "rope_scaling": dict(rope_type="linear", factor=3.0), "hidden_size": 24},
    "qwen2": {**QWEN2, "rope_scaling": {**YARN, "beta_fast": 4.0}, "hidden_size": 24},
    "qwen2-wide": {**QWEN2, "num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 20, "rope_theta": 1e6},
    "qwen2-tied": {**QWEN2, "tie_word_embeddings": True, "num_hidden_layers": 3, "rms_norm_eps": 1e-2},
    "qwen3-yarn": {**QWEN3, "rope_scaling": {**YARN, "attention_factor": 1.3, "truncate": False}, "head_dim": 10},
    "hunyuan": HUNYUAN,
    "hunyuan-alpha": {**HUNYUAN, "rope_scaling": dict(rope_type="dynamic", alpha=7.5, factor=1.0), "head_dim": 8}
    | dict(attention_bias=True, tie_word_embeddings=True),
    "hunyuan-wide": {**HUNYUAN, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 18}
    | dict(num_hidden_layers=3, rms_norm_eps=1e-2, rope_theta=300.0),
    "mistral-window": {**MISTRAL, "sliding_window": 5, "num_hidden_layers": 3},
    "qwen2-window": {**QWEN2, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
    | dict(num_hidden_layers=3),
    "qwen3-window": {**QWEN3, "sliding_window": 3, "use_sliding_window": True, "num_hidden_layers": 3}
    | dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "smollm3": SMOLLM3,
    "smollm3-fourth": {**SMOLLM3, "num_hidden_layers": 5, "no_rope_layers": None, "attention_bias": True},
    "smollm3-window": {**SMOLLM3, "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": False},
    "phi3": {**PHI3, "sliding_window": 7},
    "phi3-long": {**PHI3, "rope_scaling": LONG, "num_attention_heads": 6, "num_key_value_heads": 2}
    | dict(original_max_position_embeddings=26, max_position_embeddings=72),
    "phi4-mini": {**PHI3, "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "num_key_value_heads": 3}
    | dict(num_attention_heads=3, num_hidden_layers=3),
    "gemma": GEMMA,
    "gemma-wide": {**GEMMA, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 20, "rope_theta": 50.0},
    "gemma-biased": {**GEMMA, "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-2, "head_dim": 8}
    | dict(hidden_size=10),
    "gemma3": GEMMA3,
    "gemma3-linear": {**GEMMA3, "rope_scaling": dict(rope_type="linear", factor=8.0), "rope_theta": 100.0}
    | dict(rope_local_base_freq=30.0, query_pre_attn_scalar=6, num_key_value_heads=2, hidden_size=14),
    "gemma3-sixth": {**GEMMA3, "layer_types": None, "num_hidden_layers": 7, "num_attention_heads": 3}
    | dict(hidden_size=9, head_dim=4, intermediate_size=7, vocab_size=40),
    "olmo2": OLMO2,
    "olmo2-linear": {**OLMO2, "rope_scaling": dict(type="linear", factor=2.5), "hidden_size": 24},
    "olmo2-wide": {**OLMO2, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24}
    | dict(attention_bias=True, tie_word_embeddings=True, num_hidden_layers=3, rms_norm_eps=1e-2),
    "qwen2-mscale": {**QWEN2, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, "hidden_size": 24},
    "granite": GRANITE,
    "granite-tied": {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    | dict(num_attention_heads=5, num_key_value_heads=5, hidden_size=20, residual_multiplier=1.0),
    "granite-wide": {**GRANITE, "num_hidden_layers": 3, "rope_theta": 50.0, "logits_scaling": 8.0, "hidden_size": 24}
    | dict(embedding_multiplier=12.0, attention_multiplier=0.015625, rms_norm_eps=1e-2),
    "gemma2": GEMMA2,
    "gemma2-uncapped": {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    | dict(layer_types=["full_attention", "sliding_attention", "sliding_attention"], hidden_size=14),
    "gemma2-wide": {**GEMMA2, "num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 6}
    | dict(hidden_size=20, rms_norm_eps=1e-2, rope_theta=50.0, attn_logit_softcapping=0.5),
}
