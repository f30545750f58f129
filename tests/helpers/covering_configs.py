"""Configs in which every pair of choices occurs together, and configs drawn at random: runtimes must agree on all."""

import itertools
import random
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from random_models import write_model

from export.validate import compare
from mlx_transformer.spec.config import CHOICES, TransformerConfig
from mlx_transformer.spec.errors import UserError

BASE: dict[str, Any] = dict(vocab_size=40, d_model=16, heads=4, d_ff=24, max_positions=24)

# Values of a factor are sets of fields, so that what belongs together (sizes that go with a shape) stays together.
FACTORS: dict[str, list[dict[str, Any]]] = {
    "architecture": [
        dict(architecture="encoder-decoder", encoder_layers=2, decoder_layers=1),
        dict(architecture="encoder-decoder", encoder_layers=1, decoder_layers=2),
        dict(architecture="encoder", encoder_layers=2, decoder_layers=0),
        dict(architecture="decoder", encoder_layers=0, decoder_layers=2),
    ],
    **{
        name: [{name: value} for value in CHOICES[name]]
        for name in ("norm_placement", "norm", "activation", "positions", "tie_embeddings")
    },
    **{
        name: [{name: False}, {name: True}]
        for name in ("gated", "attention_bias", "feed_forward_bias", "output_bias", "scale_embeddings")
    },
    "heads": [dict(heads=4), dict(heads=4, key_value_heads=2), dict(heads=4, key_value_heads=1), dict(heads=1)],
    "widths": [{}, dict(d_k=6, d_v=3), dict(d_k=2, d_v=8), dict(d_model=20, heads=3, d_k=4, d_v=5)],
    "vocabulary": [{}, dict(source_vocab_size=53), dict(vocab_size=7)],
    "start": [{}, dict(pad_id=5, bos_id=5, eos_id=0)],
    "epsilon": [dict(norm_epsilon=1e-5), dict(norm_epsilon=1e-6)],
}

Choice = tuple[int, ...]


def fields_of(choice: Choice) -> dict[str, Any]:
    merged = dict(BASE)
    for values, index in zip(FACTORS.values(), choice, strict=True):
        merged |= values[index]
    return merged


def config_of(choice: Choice) -> TransformerConfig | None:
    try:
        return TransformerConfig(**fields_of(choice))
    except UserError:
        return None


def pairs_of(choice: Choice) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(choice), 2))


def covering(seed: int = 0) -> list[Choice]:
    """Accepted choices in which every pair of values that some accepted choice has occurs at least once (greedily)."""
    rng = random.Random(seed)
    counts = [len(values) for values in FACTORS.values()]
    pool = [choice for choice in (tuple(map(rng.randrange, counts)) for _ in range(6000)) if config_of(choice)]
    missing = set().union(*map(pairs_of, pool))
    chosen = []
    while missing:
        best = max(pool, key=lambda choice: len(pairs_of(choice) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


COVERING = covering()


def name_of(choice: Choice) -> str:
    fields = fields_of(choice)
    return "-".join([*(fields[name] for name in CHOICES), *(name for name in FACTORS if fields.get(name) is True)])


def assert_agreement(config: TransformerConfig, folder: Path, seed: int) -> None:
    checkpoint, onnx = write_model(config, folder, seed)
    report = compare(checkpoint, onnx, ["mlx", "onnxruntime"], seed, threads=1)
    assert report.equal, "\n".join([*report.failures(), f"seed {seed}", config.to_json()])


@st.composite
def configs(draw: st.DrawFn) -> TransformerConfig:
    """Any config that is accepted, over all fields, at sizes that run in a fraction of a second.

    The rule compares samples of rounding errors, so the smallest sizes are left to `test_smallest_sizes`: there a tap
    is one number times a fixed vector, and all inputs together hold three different tokens.
    """
    architecture = draw(st.sampled_from(CHOICES["architecture"]))
    ties = {
        "encoder-decoder": CHOICES["tie_embeddings"],
        "encoder": ("none", "all"),
        "decoder": ("none", "target-output"),
    }
    tie, positions = draw(st.sampled_from(ties[architecture])), draw(st.sampled_from(CHOICES["positions"]))
    vocab_size = draw(st.integers(12, 70))
    untied = architecture == "encoder-decoder" and tie != "all"
    key_value_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d_k = draw(st.integers(1, 12))
    pad_id, bos_id, eos_id = draw(st.permutations(range(6)))[:3]
    return TransformerConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        source_vocab_size=draw(st.integers(12, 70)) if untied else vocab_size,
        d_model=2 * draw(st.integers(4, 20)),
        encoder_layers=0 if architecture == "decoder" else draw(st.integers(1, 3)),
        decoder_layers=0 if architecture == "encoder" else draw(st.integers(1, 3)),
        heads=key_value_heads * group,
        key_value_heads=key_value_heads,
        d_k=2 * d_k if positions == "rotary" else d_k,
        d_v=draw(st.integers(2, 12)),
        d_ff=draw(st.integers(4, 40)),
        **{name: draw(st.sampled_from(CHOICES[name])) for name in ("norm_placement", "norm", "activation")},
        **{
            name: draw(st.booleans())
            for name in ("gated", "attention_bias", "feed_forward_bias", "output_bias", "scale_embeddings")
        },
        norm_epsilon=draw(st.sampled_from([1e-3, 1e-5, 1e-6, 1e-12])),
        positions=positions,
        max_positions=draw(st.integers(5, 40)),
        rotary_base=draw(st.sampled_from([100.0, 10000.0, 500000.0])),
        tie_embeddings=tie,
        dropout=draw(st.sampled_from([0.0, 0.3])),
        attention_dropout=draw(st.sampled_from([0.0, 0.3])),
        activation_dropout=draw(st.sampled_from([0.0, 0.3])),
        pad_id=pad_id,
        bos_id=pad_id if draw(st.booleans()) else bos_id,
        eos_id=eos_id,
    )
