"""twin.js, the page's live engine: every point is the reference's, and what it doesn't know it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import twin
from small_models import random_weights

from export.validate.engines.reference_engine import ReferenceEngine
from export.validate.points import inner_names
from export.validate.reference import Reference
from export.validate.reference.layers import softmax
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import Options

SOURCE, TARGET = [5, 9, 30, 7, 9, 2], [1, 8, 31, 4, 12, 44, 9]
ROUNDING = 1e-12  # of float64, in sums in another order
SIZES: dict[str, Any] = dict(
    vocab_size=50, d_model=16, heads=4, d_ff=24, max_positions=40, encoder_layers=2, decoder_layers=2
)
ONE: dict[str, dict[str, Any]] = {
    "decoder": dict(architecture="decoder", encoder_layers=0, tie_embeddings="target-output"),
    "encoder": dict(architecture="encoder", decoder_layers=0),
}
CONFIGS = {
    "paper": {},
    "paper, decoder": ONE["decoder"],
    "paper, encoder": ONE["encoder"],
    "pre": dict(norm_placement="pre", norm="rmsnorm", gated=True, activation="silu", positions="sinusoidal_halves"),
    "pre, decoder": dict(norm_placement="pre", positions="learned", activation="gelu", **ONE["decoder"]),
    "pre, encoder": dict(
        norm_placement="pre", first_norm=False, norm_bias=False, positions="none", embedding_norm=True, **ONE["encoder"]
    ),
    "untied": dict(
        tie_embeddings="none",
        source_vocab_size=60,
        positions="sinusoidal_concat",
        output_bias=True,
        attention_bias=True,
    ),
    "widths": dict(
        d_k=6,
        d_v=10,
        key_value_heads=2,
        attention_scale=0.5,
        embedding_scale=2.5,
        logit_scale=0.5,
        logit_cap=1.5,
        activation="gelu_tanh",
        first_position=3,
    ),
    "plain": dict(tie_embeddings="source-target", scale_embeddings=False, feed_forward_bias=False, norm_epsilon=1e-3),
}


def config_of(name: str) -> TransformerConfig:
    return TransformerConfig(**{**SIZES, **CONFIGS[name]})


def input_of(config: TransformerConfig) -> dict[str, list[int]]:
    return ({"source": SOURCE} if config.has_encoder else {}) | ({"target": TARGET} if config.has_decoder else {})


def reference_points(config: TransformerConfig, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    points: dict[str, np.ndarray] = {}
    given = [np.array([ids]) for ids in input_of(config).values()]
    Reference(config, weights, inner_points=True)(*given, tap=points.__setitem__)
    return {name: value[0] for name, value in points.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("twin")
    for name in CONFIGS:
        save_checkpoint(place / name, config_of(name), random_weights(config_of(name)))
    return place


@pytest.fixture(scope="module")
def computed(folder):
    """{name of a config: {point: array}}"""
    tasks = [{"kind": "points", "model": str(folder / name), **input_of(config_of(name))} for name in CONFIGS]
    return dict(zip(CONFIGS, map(twin.arrays, twin.answers(tasks)), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_point_is_the_references(name, computed):
    config = config_of(name)
    expected, found = reference_points(config, random_weights(config)), computed[name]
    assert list(found) == inner_names(config)
    assert {name: value.shape for name, value in found.items()} == {name: x.shape for name, x in expected.items()}
    for point, value in expected.items():
        np.testing.assert_allclose(found[point], value, rtol=ROUNDING, atol=ROUNDING, err_msg=point)


SWITCHES: dict[str, dict[str, Any]] = {
    "positions": {"positions": True},
    "mask": {"mask": True},
    "scale": {"scale": True},
    "residual": {"residual": True},
    "norm": {"norm": True},
    "a head": {"heads": [["decoder", 1, "cross_attention", 2]]},
    "two heads": {"heads": [["encoder", 0, "self_attention", 0], ["encoder", 0, "self_attention", 3]]},
    "a sub-layer": {"sublayers": [["encoder", 1, "feed_forward"]]},
}


class Without:
    """A tap that takes from the reference what is off: it sees each point, and says what the network goes on with."""

    def __init__(self, config: TransformerConfig, off: dict[str, Any]):
        self.config, self.off, self.points = config, off, dict[str, np.ndarray]()

    def __call__(self, name: str, value: np.ndarray) -> np.ndarray:
        before, _, last = name.rpartition(".")
        if self.off.get("positions") and last == "embedding":
            value = self.points[f"{name}.scaled"]
        elif self.off.get("mask") and name.startswith("decoder.") and name.endswith("self_attention.weights"):
            value = softmax(self.points[f"{before}.scores"])
        elif self.off.get("scale") and last == "scores":
            value = value * self.config.d_k**0.5
        elif self.off.get("residual") and last == "residual":
            value = self.points[before]
        elif self.off.get("norm") and last.endswith("_norm"):
            value = self.points[f"{name.removesuffix('_norm')}.residual"]
        elif last == "context":
            value = value.copy()
            for head in (head for *place, head in self.off.get("heads", ()) if named(*place) == before):
                value[..., head * self.config.d_v : (head + 1) * self.config.d_v] = 0
        elif any(named(*place) == name for place in self.off.get("sublayers", ())):
            value = np.zeros_like(value)
        self.points[name] = value
        return value


def named(stack: str, layer: int, kind: str) -> str:
    return f"{stack}.layers.{layer}.{kind}"


def test_what_is_off_is_missing_and_all_else_goes_on(folder, computed):
    config, model = config_of("paper"), {"model": str(folder / "paper"), "source": SOURCE, "target": TARGET}
    tasks = [{"kind": "points", **model, "switches": off} for off in (*SWITCHES.values(), {})]
    *switched, on_again = map(twin.arrays, twin.answers(tasks))
    for (name, off), found in zip(SWITCHES.items(), switched, strict=True):
        without = Without(config, off)
        Reference(config, random_weights(config), inner_points=True)(
            np.array([SOURCE]), np.array([TARGET]), tap=without
        )
        for point, value in without.points.items():
            np.testing.assert_allclose(found[point], value[0], rtol=ROUNDING, atol=ROUNDING, err_msg=f"{name}: {point}")
        assert np.abs(found["logits"] - computed["paper"]["logits"]).max() > 1e-3, name
    assert all((on_again[point] == value).all() for point, value in computed["paper"].items())


def test_step_by_step_with_what_is_remembered(folder, computed):
    for name in ("paper", "widths", "pre, decoder"):
        chunks = [TARGET[:1], TARGET[1:4], TARGET[4:5], TARGET[5:]]
        [rows] = twin.answers([{"kind": "steps", "model": str(folder / name), "source": SOURCE, "chunks": chunks}])
        np.testing.assert_allclose(rows, computed[name]["logits"], rtol=ROUNDING, atol=ROUNDING)


def test_searches_of_the_web_page_run_on_it_as_they_are(folder):
    config, model = config_of("paper"), {"model": str(folder / "paper"), "source": SOURCE}
    engine = ReferenceEngine(config, random_weights(config), "float64")
    limit = config.max_positions
    [(ids, score)] = engine.search([SOURCE], Options(beam=3, max_new_tokens=limit))
    [(greedy_ids, _)] = engine.search([SOURCE], Options(beam=1, max_new_tokens=limit))
    [beams, greedy] = twin.answers(
        [{"kind": "beam", **model, "beam": 3, "lengthPenalty": Options.length_penalty}, {"kind": "greedy", **model}]
    )
    assert [each["id"] for each in greedy if each["id"] != config.eos_id] == greedy_ids
    assert beams[0]["ids"] == ids
    assert beams[0]["score"] == pytest.approx(score, rel=1e-6)  # the search holds scores in float32


UNKNOWN = {
    "positions": dict(positions="rotary"),
    "query_key_norm": dict(query_key_norm=True),
    "decoder_self_attention": dict(decoder_self_attention="ssru"),
    "decoder": dict(decoder={"heads": 2}),
    "window": dict(window=2, **ONE["encoder"]),
    "layer_pattern": dict(layer_pattern=[{}, {"window": 3}], **ONE["encoder"]),
    "token_types": dict(token_types=2, **ONE["encoder"]),
    "head": dict(head={"kind": "hidden"}, **ONE["encoder"]),
}


def test_a_config_it_does_not_know_is_refused_with_a_sentence():
    others = [TransformerConfig(**{**SIZES, **changes}) for changes in UNKNOWN.values()]
    known = [config_of(name) for name in CONFIGS]
    said = twin.answers([{"kind": "refusal", "config": config.to_dict()} for config in [*others, *known]])
    for name, sentence in zip(UNKNOWN, said, strict=False):
        assert sentence.startswith(f"The page can't compute a model with {name} = "), name
    assert said[len(others) :] == [None] * len(known)


def test_every_field_of_a_config_is_known_or_refused():
    """A field that is new is refused until somebody says that twin.js has it."""
    [sentence] = twin.answers([{"kind": "refusal", "config": {**config_of("paper").to_dict(), "new_field": 1}}])
    assert sentence == "The page can't compute a model with new_field = 1."


def test_a_position_past_a_learned_table_is_said_in_a_sentence(folder):
    with pytest.raises(RuntimeError, match="past the model's 40: shorten the text"):
        twin.answers([{"kind": "points", "model": str(folder / "pre, decoder"), "target": [1] * 41}])


def test_rows_are_named_by_what_is_written_from_them():
    asked = [{"kind": "rowIds", "stack": stack, "ids": [1, 7, 8, 2]} for stack in ("decoder", "encoder")]
    assert twin.answers(asked) == [[7, 8, 2], [1, 7, 8, 2]]
