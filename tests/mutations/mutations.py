"""What a bug is that `validate` has to find: the place where it has to show and the operation that has to be named."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mutation_edits import Edit

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import Int8Scales, ProductScales
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.text_embedding import TextEmbedding

SIZES = dict(vocab_size=60, d_model=32, heads=4, d_ff=48, encoder_layers=2, decoder_layers=2, max_positions=40)
CONFIGS = {
    "paper": TransformerConfig(**SIZES, attention_bias=True, activation="gelu", tie_embeddings="target-output"),
    "modern": TransformerConfig(
        **SIZES, norm_placement="pre", norm="rmsnorm", positions="rotary", activation="silu", gated=True,
        key_value_heads=2,
    ),
    "relative": TransformerConfig(**SIZES, positions="relative", relative_buckets=8, relative_distance=9),
    "normed embedding": TransformerConfig(**SIZES, embedding_norm=True, positions="learned", logit_cap=3.0),
    "normed heads": TransformerConfig(
        **SIZES, query_key_norm=True, positions="rotary", norm_placement="sandwich", embedding_scale=5.5,
        residual_scale=0.25,
    ),
    "scaled": TransformerConfig(
        **SIZES, norm_placement="pre", norm="rmsnorm", positions="relative", activation="gelu_tanh", gated=True,
        feed_forward_bias=False, scale_embeddings=False, attention_scale=1.0, logit_scale=0.25, query_key_norm=True,
        query_key_norm_place="width",
    ),
    "ssru": TransformerConfig(**SIZES, decoder_self_attention="ssru", positions="sinusoidal_concat"),
    "token types": TransformerConfig(
        **{**SIZES, "decoder_layers": 0}, architecture="encoder", positions="learned", token_types=3
    ),
    "text's vector": TransformerConfig(
        **{**SIZES, "decoder_layers": 0}, architecture="encoder", positions="learned", head={"kind": "hidden"}
    ),
    "near keys": TransformerConfig(
        **{**SIZES, "decoder_layers": 0}, architecture="encoder", positions="rotary", norm_placement="pre",
        norm_bias=False, first_norm=False, layer_pattern=[{}, {"window": 3, "rotary_base": 100.0}], output_bias=True,
        head={"kind": "classes", "activation": "gelu", "norm": True, "labels": ["bad", "good"]},
    ),
    "long texts": TransformerConfig(
        **{**SIZES, "encoder_layers": 0}, architecture="decoder", tie_embeddings="target-output", positions="rotary",
        norm="rmsnorm", norm_placement="pre", rotary_width=4, layer_pattern=[{}, {"window": 3}],
        rotary_scaling=dict(kind="longrope", short=[1.0, 2.0], long=[1.5, 9.0], length=9, attention_factor=1.2),
    ),
    "decoder": TransformerConfig(
        **{**SIZES, "encoder_layers": 0}, architecture="decoder", tie_embeddings="target-output", positions="learned",
        score_cap=0.5,
    ),
    "side by side": TransformerConfig(
        **{**SIZES, "encoder_layers": 0}, architecture="decoder", tie_embeddings="target-output", positions="rotary",
        norm="rmsnorm", norm_placement="pre", d_k=16, d_v=16, key_value_heads=2, score_cap=2.0,
        layer_pattern=[{}, {"window": 4, "rotary_base": 100.0}],
    ),
    "languages": TransformerConfig(**SIZES, norm_placement="pre", positions="sinusoidal_halves"),
    "student": TransformerConfig(**SIZES, decoder_self_attention="ssru", positions="sinusoidal_halves"),
    "fixed scales": TransformerConfig(**SIZES, norm_placement="pre"),
    "one file": TransformerConfig(**{**SIZES, "max_positions": 64}, pad_id=1, bos_id=2, eos_id=3),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {"student": {"target": "cpu"}, "fixed scales": {"precision": "int8"}}
OPTIONS |= {"side by side": {"target": "cpu"}}
"""Of `export_onnx`, for some models."""
ONE_FILE = ("one file",)
"""Models that are exported with the search inside."""
FIXED = Int8Scales(
    {name: ProductScales(activation=np.float32(12)) for name in quantizable_shapes(CONFIGS["fixed scales"])},
    {"text": "drawn"},
)
"""The scales of the model that has some."""
EMBEDDINGS = {"text's vector": TextEmbedding(pooling=["mean"], normalize=True)}
"""What embedding.json of a model says."""


@dataclass(frozen=True)
class Mutation:
    """`edit` goes into the ONNX graphs `files`, or `change` into the MLX model. What finds it: `weights`, parameters'
    names; `tap` on `path`, the first point over budget, and `culprit`, how the operation's sentence goes on after it;
    `search`, a kind of tokens; `attribute`, how what is said of an operator's attributes begins. Empty: that kind of
    check sees nothing (or, of tokens and attributes, needn't)."""

    edit: Edit | None = None
    change: Callable[[Any], None] | None = None
    model: str = "paper"
    files: str = "*"
    weights: str = ""
    tap: str = ""
    path: str = "tapped"
    culprit: str = ""
    search: str = ""
    attribute: str = ""

    @property
    def runtime(self) -> str:
        return "mlx" if self.edit is None else "onnxruntime"


E0, E1, D0, D1 = "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"


def one_bit(array: np.ndarray) -> np.ndarray:
    array.reshape(-1).view(np.uint32)[5] ^= 1
    return array
