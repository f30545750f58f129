"""Configs in which every pair of choices occurs together, and configs drawn at random: runtimes must agree on all."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from options import OPTIONS, Choice, Factors, covering, drawn, factors_of, fitted, merged, options
from random_models import write_model

from export.validate import compare
from mlx_transformer.core.config import RELATIVE, SINUSOIDS, TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.system.errors import UserError

BASE: dict[str, Any] = dict(
    vocab_size=40, d_model=16, heads=4, d_ff=24, max_positions=24, decoder_self_attention="attention"
)
YARN = dict(kind="yarn", factor=4.0, length=8, beta_fast=2.0, beta_slow=0.5, truncate=False, attention_factor=1.2)
BY_HAND: Factors = {
    "architecture": [
        dict(architecture="encoder-decoder", encoder_layers=2, decoder_layers=1),
        dict(architecture="encoder-decoder", encoder_layers=1, decoder_layers=2),
        dict(architecture="encoder-decoder", encoder_layers=1, decoder_layers=2, decoder_self_attention="ssru"),
        dict(architecture="encoder", encoder_layers=2, decoder_layers=0),
        dict(architecture="encoder", encoder_layers=1, decoder_layers=0, window=2),
        dict(architecture="decoder", encoder_layers=0, decoder_layers=2),
    ],
    "placement": [
        dict(norm_placement="post"),
        dict(norm_placement="pre"),
        dict(norm_placement="pre", first_norm=False),
        dict(norm_placement="sandwich"),
        dict(norm_placement="after"),
    ],
    "norm": [dict(norm="layernorm"), dict(norm="layernorm", norm_bias=False), dict(norm="rmsnorm")],
    "heads": [dict(heads=4), dict(heads=4, key_value_heads=2), dict(heads=4, key_value_heads=1), dict(heads=1)],
    "widths": [{}, dict(d_k=6, d_v=3), dict(d_k=2, d_v=8, d_ff=17), dict(d_model=20, heads=3, d_k=4, d_v=5)],
    "vocabulary": [{}, dict(source_vocab_size=53), dict(vocab_size=7)],
    "start": [{}, dict(pad_id=5, bos_id=5, eos_id=0), dict(pad_id=1, bos_id=2, eos_id=2)],
    "epsilon": [dict(norm_epsilon=1e-5), dict(norm_epsilon=1e-6)],
    "positions": [
        *(dict(positions=kind) for kind in OPTIONS["positions"]),
        dict(positions="rotary", rotary_width=2, rotary_scaling=YARN),
    ],
    "rotary base": [{}, dict(rotary_base=100.0)],
    "attention scale": [{}, dict(attention_scale=0.7)],
    "attention biases": [
        {},
        dict(attention_bias=True),
        dict(attention_bias=True, attention_output_bias=False),
        dict(attention_output_bias=True),
    ],
    "normed heads": [
        dict(query_key_norm=False, query_key_norm_place="before"),
        *(dict(query_key_norm=True, query_key_norm_place=place) for place in ("before", "after", "width")),
    ],
    "embedding scale": [{}, dict(scale_embeddings=False), dict(embedding_scale=2.5)],
    "residual scale": [{}, dict(residual_scale=0.3)],
    "score cap": [{}, dict(score_cap=0.6), dict(score_cap=0.8, attention_scale=1.5)],
    "logit scale": [{}, dict(logit_scale=0.3)],
    "logit cap": [{}, dict(logit_cap=1.5)],
    "decoder": [{}, dict(decoder={"heads": 2, "key_value_heads": 2, "d_ff": 13}), dict(decoder={"d_v": 7})],
    "layers": [
        {},
        dict(layer_pattern=[{}, {"window": 3}]),
        dict(layer_pattern=[{}, {"heads": 2, "key_value_heads": 2, "d_ff": 11, "activation": "silu"}]),
        dict(layer_pattern=[{"query_key_norm": True}, {"attention_bias": True, "gated": True, "attention_scale": 0.4}]),
    ],
    "relative": [{}, dict(relative_buckets=8, relative_distance=9)],
    "first position": [{}, dict(first_position=3)],
    "lengths": [{}, dict(max_positions=17)],
    "token types": [{}, dict(token_types=3)],
}
FACTORS = factors_of(BY_HAND)


def fields_of(choice: Choice) -> dict[str, Any]:
    return {**BASE, **merged(FACTORS, choice)}


def accepted(values: dict[str, Any]) -> bool:
    if values != fitted(values):  # quicker than a config's own refusal
        return False
    try:
        return bool(TransformerConfig(**{**BASE, **values}))
    except UserError:
        return False


def config_of(choice: Choice) -> TransformerConfig:
    return TransformerConfig(**fields_of(choice))


COVERING = covering(FACTORS, accepted, draws=20000)  # of which one in ten is accepted


def name_of(choice: Choice) -> str:
    fields = fields_of(choice)
    named = [str(fields[name]) for name, values in OPTIONS.items() if bool not in map(type, values)]
    named += [str(fields[name]) for name in ("window", "layer_pattern") if name in fields]
    return "-".join([*named, *(name for name in OPTIONS if fields.get(name) is True)])


def assert_agreement(config: TransformerConfig, folder: Path, seed: int, searches: bool = True) -> None:
    checkpoint, onnx = write_model(config, folder, seed)
    report = compare(checkpoint, onnx, ["mlx", "onnxruntime"], seed, threads=1, searches=searches)
    assert report.equal, "\n".join([*report.failures(), f"seed {seed}", config.to_json()])


LABELS = ("a", "b", "c")
BARE: dict[str, Any] = dict(output_bias=False, logit_scale=None, logit_cap=None)  # a head without a classifier
HEADS: list[dict[str, Any]] = [
    {},
    {},
    dict(head=Head(activation="tanh", norm=True)),
    dict(head=Head(kind="hidden"), **BARE, tie_embeddings="all"),
    dict(head=Head(kind="pooled", activation="tanh"), **BARE, tie_embeddings="all"),
    dict(head=Head(kind="classes", labels=LABELS, pooling="mean"), tie_embeddings="all"),
    dict(head=Head(kind="token-classes", labels=LABELS, activation="gelu"), tie_embeddings="all"),
    dict(head=Head(kind="spans"), tie_embeddings="all"),
]


@st.composite
def configs(draw: st.DrawFn, architecture: str | None = None) -> TransformerConfig:
    """Any config that is accepted (of this architecture), over all fields, at sizes that run in a fraction of a second.

    The rule compares samples of rounding errors, so the smallest sizes are left to `test_smallest_sizes`: there a tap
    is one number times a fixed vector, and all inputs together hold three different tokens.
    """
    key_value_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pad_id, bos_id, eos_id = draw(st.permutations(range(6)))[:3]
    values = draw(options())
    values |= {} if architecture is None else {"architecture": architecture}
    d_k = draw(st.integers(1, 12))
    own = draw(st.sampled_from([{}, {}, {"heads": 4, "key_value_heads": 2}, {"d_ff": 9, "gated": True}, {"d_v": 3}]))
    near = [{}, {}, dict(window=2), dict(layer_pattern=[{}, {"window": 3}])]
    turned = [dict(layer_pattern=[{"rotary_base": 50.0}, {"positions": "none", "d_ff": 5}])]
    turned += [dict(layer_pattern=[{"rotary_scaling": YARN}, {"d_k": 4, "d_v": 5, "gated": True, "rotary_width": 2}])]
    sees_all = values["architecture"] == "encoder-decoder" or values["positions"] in RELATIVE
    near = [{}, {}] if sees_all else [*near, dict(layer_pattern=[{"window": 1}, {"d_k": 4, "d_ff": 5}])]
    local = draw(st.sampled_from([*near, *(turned if values["positions"] == "rotary" else [])]))
    head = draw(st.sampled_from(HEADS if values["architecture"] == "encoder" else [{}]))
    return drawn(
        dict(
            **values,
            vocab_size=draw(st.integers(12, 70)),
            source_vocab_size=draw(st.integers(12, 70)),
            d_model=2 * draw(st.integers(4, 20)),
            encoder_layers=draw(st.integers(1, 3)),
            decoder_layers=draw(st.integers(1, 3)),
            heads=key_value_heads * group,
            key_value_heads=key_value_heads,
            d_k=2 * d_k if values["positions"] == "rotary" else d_k,
            d_v=draw(st.integers(2, 12)),
            d_ff=draw(st.integers(4, 40)),
            norm_epsilon=draw(st.sampled_from([1e-3, 1e-5, 1e-6, 1e-12])),
            max_positions=draw(st.integers(5, 40)),
            first_position=draw(st.sampled_from([0, 2])) if values["positions"] in SINUSOIDS else 0,
            rotary_base=draw(st.sampled_from([100.0, 10000.0, 500000.0])),
            attention_scale=draw(st.sampled_from([None, 0.3, 1.0])),
            embedding_scale=draw(st.sampled_from([None, 2.5])) if values["scale_embeddings"] else None,
            residual_scale=draw(st.sampled_from([None, 0.2, 3.0])),
            score_cap=draw(st.sampled_from([None, 0.5, 30.0])),
            logit_scale=draw(st.sampled_from([None, 0.2, 2.0])),
            logit_cap=draw(st.sampled_from([None, 0.5, 30.0])),
            decoder=own if values["architecture"] == "encoder-decoder" else {},
            dropout=draw(st.sampled_from([0.0, 0.3])),
            attention_dropout=draw(st.sampled_from([0.0, 0.3])),
            activation_dropout=draw(st.sampled_from([0.0, 0.3])),
            pad_id=pad_id,
            bos_id=draw(st.sampled_from([pad_id, eos_id, bos_id])),
            eos_id=eos_id,
        )
        | head
        | local
    )
