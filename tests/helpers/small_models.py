"""Small random models of many kinds, for tests of the exporter: every option of the config occurs in one of them."""

from pathlib import Path

import numpy as np
from options import completed, fitted

from export import export_onnx
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.text.tokenizer import Tokenizer

SIZES = dict(vocab_size=50, d_model=32, heads=4, d_ff=48, max_positions=40, encoder_layers=2, decoder_layers=2)

NAMED = {
    "paper": {},
    "modern": dict(
        positions="rotary", norm="rmsnorm", gated=True, activation="silu", norm_placement="pre", key_value_heads=2
    ),
    "odd widths": dict(
        d_k=6,
        d_v=10,
        key_value_heads=1,
        attention_bias=True,
        attention_output_bias=False,
        output_bias=True,
        embedding_scale=3.25,
        positions="learned",
        activation="gelu",
    ),
    "turned heads": dict(
        norm_placement="sandwich", positions="rotary", query_key_norm=True, query_key_norm_place="after"
    ),
    "two vocabularies": dict(
        tie_embeddings="target-output",
        source_vocab_size=60,
        positions="sinusoidal_concat",
        activation="gelu_tanh",
        feed_forward_bias=False,
        attention_output_bias=True,
        norm_placement="after",
        score_cap=0.5,
        residual_scale=0.4,
        scale_embeddings=False,
    ),
    "untied": dict(
        tie_embeddings="none",
        output_bias=True,
        residual_scale=1.5,
        score_cap=0.7,
        positions="none",
        norm_placement="pre",
        attention_scale=0.5,
        logit_scale=0.5,
        logit_cap=2.0,
        query_key_norm=True,
        query_key_norm_place="width",
        decoder={"heads": 2, "key_value_heads": 1, "d_k": 8, "d_v": 5, "d_ff": 40},
    ),
}
CHOICES = completed(NAMED)


def encoder_decoder(name: str) -> TransformerConfig:
    return TransformerConfig(**fitted({**SIZES, **CHOICES[name]}))


def alone(name: str, architecture: str) -> TransformerConfig:
    """The same choices in an encoder or a decoder alone."""
    return TransformerConfig(**fitted({**SIZES, **CHOICES[name], "architecture": architecture}))


def configs() -> dict[str, TransformerConfig]:
    """Every choice in every architecture."""
    named = {name: encoder_decoder(name) for name in CHOICES}
    for architecture in ("encoder", "decoder"):
        named |= {f"{name}, {architecture}": alone(name, architecture) for name in CHOICES}
    return named


def random_weights(config: TransformerConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Values of the size that training leaves; no norm or bias stays at 1 or 0, where a mistake would not show."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            weights[name] = values * np.float32(shape[1] ** -0.5)
        else:
            weights[name] = np.float32(0.1) * values + np.float32(name.endswith("norm.weight"))
    return weights


DECODER = {"architecture": "decoder", "encoder_layers": 0, "tie_embeddings": "target-output"}


def write_text_model(folder: Path, max_positions: int = 60, **changes) -> Path:
    """FOLDER/model, a checkpoint with a tokenizer, and FOLDER/onnx, its export. changes: such as DECODER. -> FOLDER"""
    tokenizer = Tokenizer.train(["one two three. four five six! größer 東京 " * 3], vocab_size=280)
    config = TransformerConfig(
        **{**SIZES, "vocab_size": tokenizer.vocab_size, "max_positions": max_positions, **changes}
    )
    save_checkpoint(folder / "model", config, random_weights(config), tokenizer.to_json(), force=True)
    export_onnx(folder / "model", folder / "onnx", force=True)
    return folder
