"""Every model that `TransformerConfig` accepts is the same function in MLX, in ONNX Runtime and in the reference.

`make test-slow` runs a fixed set in which every pair of choices occurs together, of which `make test` takes a few
configs that have every choice, and then draws configs at random.
Combinations that make no sense are refused, each by its name.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from combined import SLOW, each_value
from covering_configs import BASE, COVERING, assert_agreement, config_of, configs, name_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from options import OPTIONS, Choice
from random_models import write_model

from export.validate import compare
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import field_types


def test_the_fixed_set_has_every_value_of_every_option() -> None:
    configs = [config_of(choice) for choice in COVERING]
    for name, allowed in OPTIONS.items():
        assert {getattr(config, name) for config in configs} == set(allowed)
    pairs = {(config.positions, config.architecture) for config in configs}
    assert len(pairs) == len(OPTIONS["positions"]) * len(OPTIONS["architecture"])


def test_no_field_is_forgotten() -> None:
    """Dropout is training's; whatever else is added to the config is an option or must be varied by hand above."""
    configs = [config_of(choice) for choice in COVERING]
    for name in field_types(TransformerConfig).keys() - {"dropout", "attention_dropout", "activation_dropout"}:
        assert len({getattr(config, name) for config in configs}) > 1, f"{name} has one value in all: vary it by hand"


FAST = [row.values[0] for row in each_value(COVERING) if not row.marks]


@pytest.mark.parametrize(
    ("choice", "searches"),
    [
        *(pytest.param(row, False, id=name_of(row)) for row in FAST),
        *(pytest.param(row, True, id=f"{name_of(row)}, with searches", marks=SLOW) for row in COVERING),
    ],
)
def test_runtimes_agree(choice: Choice, searches: bool, tmp_path: Path) -> None:
    """Searches of fewer configs are in `test_validate.py` and in the tests of the targets."""
    assert_agreement(config_of(choice), tmp_path, sum(choice), searches)


@pytest.mark.slow
@settings(max_examples=220, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # the config is printed: no shrinking
@given(config=configs(), seed=st.integers(0, 2**32 - 1))
def test_runtimes_agree_on_any_config(config: TransformerConfig, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_agreement(config, Path(folder), seed)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(d_ff=1, d_k=1, d_v=1), marks=SLOW),
        pytest.param(dict(max_positions=1), marks=SLOW),
        dict(max_positions=2, vocab_size=3),
        pytest.param(dict(d_model=2, heads=1, d_ff=1, norm="rmsnorm", positions="none"), marks=SLOW),
        dict(architecture="decoder", encoder_layers=0, tie_embeddings="none", max_positions=1, positions="learned"),
        dict(architecture="encoder", decoder_layers=0, max_positions=1, vocab_size=3, heads=1, d_k=2, d_v=1),
    ],
    ids=str,
)
def test_smallest_sizes(changes: dict[str, Any], tmp_path: Path) -> None:
    config = TransformerConfig(**{**BASE, **dict(encoder_layers=1, decoder_layers=1), **changes})
    report = compare(*write_model(config, tmp_path, seed=1), ["mlx", "onnxruntime"], seed=1, threads=1)
    assert max(point.worst.deviation.max for point in report.points) < 1e-5
    assert all(check.passed for check in (*report.weights, *report.tokens)), report.failures()


ENCODER = dict(architecture="encoder", decoder_layers=0)
DECODER = dict(architecture="decoder", encoder_layers=0, tie_embeddings="none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[
            ({name: "other"}, f"{name}='other' " + ("must be true or false" if kind.type is bool else "is not one of "))
            for name, kind in field_types(TransformerConfig).items()
            if kind.choices
        ],
        (dict(heads=2.0), "heads=2.0 must be a whole number of at least 1"),
        (dict(pad_id=-1), "pad_id=-1 must be a whole number of at least 0"),
        (dict(gated=1), "gated=1 must be true or false"),
        (dict(dropout=1.0), "dropout=1.0 must be a number of at least 0 and below 1"),
        (dict(dropout="0.1"), "dropout='0.1' must be a number"),
        (dict(rotary_base=float("inf")), "rotary_base=inf must be a number of at least 1 and"),
        (dict(rotary_base=10**400), "must be a number of at least 1 and"),
        (dict(norm_epsilon=float("nan")), "norm_epsilon=nan must be a number of at least 1e-30"),
        (dict(heads=3), "d_model=16 is not a multiple of heads=3: give d_k and d_v"),
        (dict(key_value_heads=3), "heads=4 is not a multiple of key_value_heads=3"),
        (dict(eos_id=40), "eos_id=40 is outside the vocabulary of 40"),
        (dict(pad_id=35, source_vocab_size=30, tie_embeddings="none"), "pad_id=35 is outside the vocabulary of 30"),
        (dict(pad_id=2), "eos_id must differ from pad_id"),
        (dict(eos_id=1, pad_id=1), "eos_id must differ from pad_id"),
        (dict(positions="rotary", d_k=3, d_v=4), "positions='rotary' turns pairs: d_k=3 must be even"),
        (dict(d_model=15, d_k=4, d_v=4), "positions='sinusoidal' needs an even width: d_model=15"),
        (dict(d_model=2, heads=1, positions="sinusoidal_concat"), "d_model=2 must be at least 4"),
        (dict(encoder_layers=0), "encoder_layers=0: an encoder-decoder needs at least 1"),
        (dict(decoder_layers=0), "decoder_layers=0: an encoder-decoder needs at least 1"),
        (dict(source_vocab_size=41), "needs vocabularies of one size: source_vocab_size=41, vocab_size=40"),
        (ENCODER | dict(source_vocab_size=41), "an architecture of 'encoder' alone has one vocabulary"),
        (ENCODER | dict(encoder_layers=0), "encoder_layers=0: an encoder needs at least 1"),
        (ENCODER | dict(decoder_layers=1), "decoder_layers=1: an encoder has no decoder (give 0)"),
        (ENCODER | dict(tie_embeddings="target-output"), "an encoder has no target embedding (use 'all' or 'none')"),
        (DECODER | dict(source_vocab_size=41), "an architecture of 'decoder' alone has one vocabulary"),
        (DECODER | dict(decoder_layers=0), "decoder_layers=0: a decoder needs at least 1"),
        (DECODER | dict(encoder_layers=1), "encoder_layers=1: a decoder has no encoder (give 0)"),
        (DECODER | dict(tie_embeddings="all"), "a decoder has no source embedding (use 'target-output' or 'none')"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TransformerConfig(**{**BASE, **changes})
    assert message in str(caught.value)
    assert str(caught.value).startswith("TransformerConfig: ")


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(UserError, match=r"heads=0 .*; d_ff=-2 .*; gated=3 .*; dropout=2 "):
        TransformerConfig(**{**BASE, **dict(heads=0, d_ff=-2, gated=3, dropout=2)})
