"""Marian (Junczys-Dowmunt et al. 2018) as `transformers` keeps it: the paper's model, norms behind each sub-layer."""

from __future__ import annotations

from .engine import Family

MARIAN = Family(
    model_type="marian",
    name="Marian",
    architectures="MarianMTModel",
    norm_placement="post",
    defaults={
        "vocab_size": 58101,
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
        "pad_token_id": 58100,
        "decoder_start_token_id": 58100,
        "eos_token_id": 0,
    },
    vocabularies="two",
    constants={
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "add_bias_logits": False,
    },
)
