"""The rules of published models in the reference's search, and what is said of a runtime that doesn't keep one."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combined import SLOW, thinned
from ending_models import PRE_NORM, made
from random_models import random_weights, write_model
from small_models import encoder_decoder

from export import export_search
from export.validate import compare
from export.validate.cases import grid
from export.validate.checks.free_running import BORDERS, RULES, WITHOUT_LIMIT, free_running, half_of, rules_for
from export.validate.engines.reference_engine import ReferenceEngine
from export.validate.reference.rules import check_known, without_end
from export.validate.reference.search import beam_search, scored_along
from mlx_transformer import UserError
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.decoding.options import Options
from mlx_transformer.families.generation import settings_of
from mlx_transformer.generation.settings import SETTINGS

TESTS = Path(__file__).parents[2] / "mlx_transformer"
GOLDEN = json.loads((TESTS / "decoding" / "rules.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rules") / "marian"
    import_huggingface(TESTS / "decoding" / "rules_model", out)
    return out


def engine(checkpoint: Path, precision: str = "float64") -> ReferenceEngine:
    opened = open_checkpoint(checkpoint)
    return ReferenceEngine(opened.config, dict(opened.tensors()), precision)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=SLOW)])  # every fourth has each rule
def test_tokens_and_scores_are_those_of_transformers(marian: Path, step: int) -> None:
    reference = engine(marian)
    for case in GOLDEN["cases"][::step]:
        settings, _ = settings_of({}, case["settings"], reference.config, "here")
        found = reference.search(GOLDEN["ids"], Options(**settings))
        assert [ids for ids, _ in found] == case["tokens"], case["settings"]
        if "scores" in case:
            np.testing.assert_allclose([score for _, score in found], case["scores"], rtol=1e-5, atol=1e-5)


REQUESTS = [
    {"repetition_penalty": 1.5, "no_repeat_ngram": 2},
    {"beam": 3, "no_repeat_ngram": 2, "end_ids": [7, 9, 11], "forced_first": [4, 6]},
    {"beam": 2, "repetition_penalty": 1.3, "forced_end": True, "max_new_tokens": 9, "suppressed": [5, 8]},
    {"beam": 4, "heuristic_stop": True, "length_penalty": 1.5, "penalty_form": "length", "forced_first": [12]},
    {"beam": 3, "early_stopping": True, "min_new_tokens": 4, "length_penalty": -1.0},
    {"sample": True, "seed": 4, "no_repeat_ngram": 1, "repetition_penalty": 0.8, "suppressed": [3]},
    {"beam": 3, "banned_sequences": [[4, 6], [5, 8, 7], [3, 3]], "suppressed_first": [4, 6, 9, 11]},
    {"banned_sequences": [[i, j] for i in range(3, 9) for j in range(3, 20)], "suppressed_first": [5, 7]},
]


@pytest.mark.fast("encoder-decoder")
@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder"])
def test_the_reference_finds_what_mlx_finds(architecture: str, tmp_path: Path) -> None:
    layers = {"encoder_layers": 0} if architecture == "decoder" else {}
    model, checkpoint = made(tmp_path, **PRE_NORM, architecture=architecture, **layers)
    reference, rng = engine(checkpoint), np.random.default_rng(5)
    rows = [rng.integers(3, model.config.vocab_size, n).tolist() for n in (2, 9, 5, 1)]
    for request in REQUESTS:
        options = {"max_new_tokens": 10, **request}
        expected = model.search(rows, **options)
        found = reference.search(rows, Options(**options))
        assert [ids for ids, _ in found] == [best[0].ids for best in expected], request
        np.testing.assert_allclose(
            [score for _, score in found], [best[0].score for best in expected], rtol=1e-4, atol=1e-4
        )
        if "beam" in request:  # the score along given ids is the search's
            states = beam_search(reference.model, rows, Options(**options))
            hypotheses = [(s, score, h) for s in states for score, h in s.finished]
            outputs = [(s, without_end(h.tokens, model.config, s.options)) for s, _, h in hypotheses]
            scores = [score for score, _ in scored_along(reference.model, outputs)]
            np.testing.assert_allclose(scores, [score for _, score, _ in hypotheses], rtol=1e-9)


def test_a_rule_that_the_reference_does_not_have_is_an_error() -> None:
    check_known(Options(batch_tokens=5, beam=2, suppressed=(4,)))
    with pytest.raises(UserError, match="the reference search has no temperature"):
        check_known(Options(sample=True, temperature=0.5))


class Breaking(ReferenceEngine):
    """A runtime that forgets one rule."""

    forgotten: str = ""

    def search(self, sources: Any, options: Options, candidates: Any = None) -> Any:
        if self.forgotten == "candidates":
            return super().search(sources, options)
        given = vars(options) | {self.forgotten: getattr(Options(), self.forgotten)}
        if self.forgotten == "max_length_factor" and options.max_new_tokens is None:
            given["max_new_tokens"] = 8
        return super().search(sources, Options(**given), candidates)


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends before long."""
    return made(tmp_path_factory.mktemp("sharp"), **PRE_NORM)[1]


RULE_NAMES = [
    "forced_first",
    "suppressed",
    "end_ids",
    "forced_end",
    "repetition_penalty",
    "no_repeat_ngram",
    "min_new_tokens",
    "penalty_form",
    "suppressed_first",
    "banned_sequences",
    "max_length_factor",
    "candidates",
]


@pytest.mark.fast("nothing", "forced_first")
@pytest.mark.parametrize("rule", ["nothing", *thinned(RULE_NAMES, 6)])
def test_a_runtime_that_forgets_a_rule_is_found(sharp: Path, rule: str) -> None:
    opened = open_checkpoint(sharp)
    config, weights = opened.config, dict(opened.tensors())
    other = (ReferenceEngine if rule == "nothing" else Breaking)(config, weights, "float32")
    if isinstance(other, Breaking):
        other.forgotten = rule
    reference = engine(sharp)
    settings = rule_by_itself(reference, rule)
    half = partial(half_of, config)
    found = list(free_running(reference.model, [other], grid(config, 3), {"reference": 1e-4}, str, settings, half))
    assert {check.search for check in found} > {f"greedy{RULES}", f"beam 4{RULES}"}
    assert all(check.passed for check in found) == (rule == "nothing")


def rule_by_itself(reference: ReferenceEngine, rule: str) -> dict[str, Any]:
    """Settings in which this rule changes what is written, whatever the others do."""
    sources = [row for case in grid(reference.config, 3) if len(case.ids) > 1 for row in case.rows()][:4]
    written = [ids for ids, _ in reference.search(sources, Options(max_new_tokens=8))]
    often = max({t for row in written for t in row}, key=lambda t: sum(t in row for row in written))
    return {
        "suppressed": {"suppressed": (often,)},
        "end_ids": {"end_ids": (often,)},
        "min_new_tokens": {"min_new_tokens": 8, "end_ids": (often,)},
        "penalty_form": {"beam": 4, "penalty_form": "length"},
        "forced_end": {"forced_end": True, "max_new_tokens": 2},
        "banned_sequences": {"banned_sequences": tuple({pair for row in written for pair in pairwise(row)})},
        "suppressed_first": {"suppressed_first": tuple({row[0] for row in written if row})},
    }.get(rule, {**rules_for(reference.config, 8, 9), "max_new_tokens": 8})


def test_the_settings_of_a_model_are_in_force_in_every_runtime(tmp_path: Path) -> None:
    config = dataclasses.replace(encoder_decoder("paper"), encoder_layers=1, decoder_layers=1)
    own = {"beam": 3, "suppressed": [7, 8], "no_repeat_ngram": 2, "forced_end": True, "max_new_tokens": 9}
    checkpoint, exported = write_model(config, tmp_path, 1, texts={SETTINGS: json.dumps(own)})
    report = compare(checkpoint, exported, seed=1, threads=1)
    assert report.equal, report.failures()
    named = {(check.runtime, check.search) for check in report.tokens}
    assert {("mlx", f"greedy{RULES}"), ("onnxruntime", "as the model's own settings say")} <= named
    file = export_search(checkpoint, tmp_path / "search.onnx")
    report = compare(checkpoint, file, ["onnxruntime"], seed=1, threads=1)
    assert report.equal, report.failures()
    assert {check.search for check in report.tokens} >= {f"beam 4{RULES}", "as the model's own settings say"}


class AtBorders(ReferenceEngine):
    """A runtime that is wrong at one border of what its options take."""

    wrong: str = ""

    def n_best(self, sources: Any, options: Options, candidates: Any = None) -> Any:
        found = super().n_best(sources, self.taken(options), candidates)
        return [rows[:1] for rows in found] if self.wrong == "n_best" else found

    def search(self, sources: Any, options: Options, candidates: Any = None) -> Any:
        return super().search(sources, self.taken(options), candidates)

    def taken(self, options: Options) -> Options:
        given = dict(vars(options))
        if self.wrong == "id 0":
            given["forced_first"] = tuple(i for i in options.forced_first if i)
        if self.wrong == "start 0":
            given["start_id"] = options.start_id or None
        if self.wrong == "last id":
            given["suppressed"] = tuple(i for i in options.suppressed if i != self.config.vocab_size - 1)
            given["forced_first"] = tuple(i for i in options.forced_first if i != self.config.vocab_size - 1)
        if self.wrong == "limit" and options.max_new_tokens is None:
            given["max_length_factor"] = 2.0
        return Options(**given)


@pytest.mark.fast("", "id 0")
@pytest.mark.parametrize("wrong", ["", *thinned(["id 0", "start 0", "last id", "limit", "n_best"], 3)])
def test_a_runtime_that_is_wrong_at_a_border_is_found(wrong: str, tmp_path: Path) -> None:
    """Ids 0 and V - 1 are words of this model."""
    config = dataclasses.replace(encoder_decoder("paper"), pad_id=1, bos_id=2, eos_id=3)
    opened = open_checkpoint(save_checkpoint(tmp_path / "model", config, random_weights(config, 1)))
    other = AtBorders(config, dict(opened.tensors()), "float32")
    other.wrong = wrong
    reference = engine(opened.folder)
    found = list(free_running(reference.model, [other], grid(config, 3), {"reference": 1e-4}, str))
    failed = {check.search for check in found if not check.passed}
    assert {check.search for check in found} >= {"greedy, limit 1", f"greedy{BORDERS}", WITHOUT_LIMIT}
    expected = {"": set(), "limit": {WITHOUT_LIMIT}}.get(wrong, {f"beam 4, 2 best{BORDERS}"})
    assert failed >= expected
    assert bool(failed) == bool(wrong)
