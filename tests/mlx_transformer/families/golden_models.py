"""The models of the golden folders, by their config: of each family several, with sizes that differ."""

from __future__ import annotations

T5 = dict(
    model_type="t5",
    **dict(vocab_size=40, d_model=16, d_kv=6, num_heads=3, d_ff=20, num_layers=2, num_decoder_layers=1),
    **dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0),
)
GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
STACKS = dict(
    **dict(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=2, max_position_embeddings=26),
    **dict(encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=20, decoder_ffn_dim=26),
    forced_eos_token_id=None,
)
ODD = dict(d_model=15, encoder_attention_heads=3, decoder_attention_heads=5, encoder_layers=2, decoder_layers=1)
MARIAN = dict(
    model_type="marian",
    **STACKS,
    **dict(pad_token_id=39, decoder_start_token_id=39, eos_token_id=0),
    **dict(activation_function="swish", scale_embedding=True),
)
BART = dict(
    model_type="bart", **STACKS, **dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)
)
MBART = {**BART, "model_type": "mbart", "activation_function": "relu", "scale_embedding": True}
M2M100 = {**BART, "model_type": "m2m_100"}

MODELS = {
    "t5": T5,
    "t5-1.1": {**T5, **GATED, "num_decoder_layers": 2},
    "mt5": {**T5, "model_type": "mt5", "feed_forward_proj": "gated-gelu", "d_model": 20, "d_kv": 5}
    | dict(relative_attention_num_buckets=8, relative_attention_max_distance=12),
    "madlad": {**T5, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False}
    | dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=0),
    "flan": {**T5, **GATED, "num_heads": 5, "d_kv": 3, "num_layers": 3, "num_decoder_layers": 2, "d_model": 12},
    "t5-buckets": {**T5, "num_heads": 2, "d_kv": 7, "feed_forward_proj": "gated-relu", "num_decoder_layers": 2}
    | dict(relative_attention_num_buckets=7, relative_attention_max_distance=17, layer_norm_epsilon=1e-3),
    "mt0": {**T5, **GATED, "model_type": "mt5", "num_heads": 2, "num_layers": 2, "num_decoder_layers": 1},
    "umt5": {**T5, "model_type": "umt5", "feed_forward_proj": "gated-gelu", "num_layers": 3, "num_decoder_layers": 2},
    "umt5-odd": {**T5, "model_type": "umt5", "num_heads": 5, "d_kv": 4, "d_model": 18}
    | dict(relative_attention_num_buckets=8, relative_attention_max_distance=11, num_decoder_layers=2)
    | dict(feed_forward_proj="gated-silu"),
    "marian": MARIAN,
    "marian-untied": {**MARIAN, "encoder_layers": 2, "decoder_layers": 1, "d_model": 12, "tie_word_embeddings": False}
    | dict(encoder_attention_heads=3, decoder_attention_heads=6, activation_function="gelu", scale_embedding=False),
    "marian-apart": {**MARIAN, "share_encoder_decoder_embeddings": False, "decoder_ffn_dim": 9},
    "pegasus": {**MARIAN, "model_type": "pegasus", "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    | dict(activation_function="relu"),
    "bart": BART,
    "bart-odd": {**BART, **ODD, "scale_embedding": True, "tie_word_embeddings": False, "forced_bos_token_id": 0},
    "bart-wide": {**BART, "d_model": 12, "encoder_attention_heads": 1, "decoder_attention_heads": 6}
    | dict(encoder_layers=3, decoder_layers=1, activation_function="gelu_new", decoder_ffn_dim=7),
    "mbart": {**MBART, "decoder_start_token_id": 37},
    "mbart-50": {**MBART, "forced_bos_token_id": 33, "activation_function": "gelu"},
    "mbart-odd": {**MBART, **ODD, "scale_embedding": False, "tie_word_embeddings": False},
    "m2m100": {**M2M100, "forced_bos_token_id": 33},
    "small100": {**M2M100, "encoder_layers": 3, "decoder_layers": 1, "d_model": 18, "decoder_attention_heads": 1}
    | dict(encoder_attention_heads=3, activation_function="gelu"),
    "nllb-odd": {**M2M100, "d_model": 10, "encoder_attention_heads": 5, "scale_embedding": False}
    | dict(pad_token_id=5, tie_word_embeddings=False, activation_function="swish"),
}
TIED_MT5 = {**T5, "model_type": "mt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": True}
MODELS_OF_4: dict[str, dict] = {
    "mt5-tied": TIED_MT5,
    "umt5-untied": {**MODELS["umt5"], **GATED, "d_model": 14, "num_heads": 2, "num_layers": 2},
}
"""Those of which version 5 computes something else."""
MODELS_OF_5: dict[str, dict] = {
    "mt5-tied-in-5": TIED_MT5,
    "marian-two": {**MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 47},
    "marian-three": {**MARIAN, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    | dict(vocab_size=50, decoder_vocab_size=41, decoder_layers=1, encoder_layers=3),
    "t5-tied-unscaled": {**T5, **GATED},
}
"""Those of which version 4 computes something else: version 5 ties every T5."""
