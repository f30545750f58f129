"""Sizes and choices of models by name: values of `TransformerConfig`'s fields, the others being its defaults."""

from __future__ import annotations

from typing import Any

# Heads of 64 everywhere but in student: Metal has no fused attention for heads of 32. base and big are rows of the
# paper's table 3; student is Marian's "tiny", a network that its engines run.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(encoder_layers=2, decoder_layers=2, d_model=128, heads=2, d_ff=512, dropout=0.1),
    "small": dict(encoder_layers=3, decoder_layers=3, d_model=256, heads=4, d_ff=1024, dropout=0.1),
    "base": dict(encoder_layers=6, decoder_layers=6, d_model=512, heads=8, d_ff=2048, dropout=0.1),
    "big": dict(encoder_layers=6, decoder_layers=6, d_model=1024, heads=16, d_ff=4096, dropout=0.3),
    "student": dict(
        encoder_layers=6,
        decoder_layers=2,
        d_model=256,
        heads=8,
        d_ff=1536,
        dropout=0.1,
        decoder_self_attention="ssru",
        norm_placement="post",
        norm_epsilon=1e-6,
        attention_bias=True,
        output_bias=True,
        positions="sinusoidal_concat",
    ),
}
