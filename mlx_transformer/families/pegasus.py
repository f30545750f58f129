"""Pegasus (Zhang et al. 2020) as `transformers` keeps it: the paper's model with norms before each sub-layer.

One more norm stands behind each stack, and encoder and decoder share one table of embeddings.
"""

from __future__ import annotations

from .engine import Family

PEGASUS = Family(
    model_type="pegasus",
    name="Pegasus",
    architectures="PegasusForConditionalGeneration",
    norm_placement="pre",
    defaults={
        "vocab_size": 50265,
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "max_position_embeddings": 1024,
        "scale_embedding": False,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
    },
    vocabularies="one",
    constants={
        "normalize_before": True,
        "normalize_embedding": False,
        "add_final_layer_norm": True,
        "add_bias_logits": False,
        "static_position_embeddings": True,
    },
)
