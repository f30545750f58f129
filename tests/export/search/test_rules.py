"""Rules of published models in every runtime: tokens and scores of `transformers`, and with prompts those of MLX."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from combined import combined, in_pairs, shared_out
from ending_models import PRE_NORM, made

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from mlx_transformer import UserError
from mlx_transformer.convert import import_huggingface
from mlx_transformer.families.generation import settings_of
from mlx_transformer.generation.settings import SETTINGS

TESTS = Path(__file__).parents[2] / "mlx_transformer"
GOLDEN = json.loads((TESTS / "decoding" / "rules.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny Marian, with settings of its own."""
    folder = tmp_path_factory.mktemp("rules")
    import_huggingface(TESTS / "decoding" / "rules_model", folder / "marian")
    return folder / "marian"


def opened(checkpoint, runtime):
    kind, _, target = runtime.rpartition(" ")
    out = checkpoint.parent / (f"{target}.onnx" if kind else target)
    if kind:
        return SearchModel(export_search(checkpoint, out, target=target, force=True), threads=1)
    return OnnxTransformer(export_onnx(checkpoint, out, target=target, force=True), threads=1)


@pytest.mark.fast("portable-shared", "search cpu-shared")
@pytest.mark.parametrize(
    ("name", "cases"), shared_out(GOLDEN["cases"], ["portable", "cpu", "search portable", "search cpu"])
)
def test_tokens_and_scores_are_those_of_transformers(name, cases, checkpoint):
    """The reference, by which `validate` judges all of them, finds every case (tests/export/validate)."""
    runtime = opened(checkpoint, name)
    for case in cases:
        settings, _ = settings_of({}, case["settings"], runtime.config, "here")
        found = runtime.search(GOLDEN["ids"], **settings)
        assert [best[0].ids for best in found] == case["tokens"], case["settings"]
        if "scores" in case:
            np.testing.assert_allclose([best[0].score for best in found], case["scores"], rtol=1e-5, atol=1e-5)
        if settings.get("beam", 1) == 1:  # whose scores are computed only where they are asked for
            assert runtime.generate(GOLDEN["ids"], **settings) == case["tokens"]


REQUESTS = [
    {"repetition_penalty": 1.5, "no_repeat_ngram": 2},
    {"beam": 3, "n_best": 3, "no_repeat_ngram": 2, "end_ids": [7, 9, 11], "forced_first": [4, 6]},
    {"beam": 2, "repetition_penalty": 1.3, "forced_end": True, "max_new_tokens": 9, "suppressed": [5, 8]},
    {"beam": 4, "heuristic_stop": True, "length_penalty": 1.5, "penalty_form": "length", "forced_first": [12]},
    {"sample": True, "seed": 4, "no_repeat_ngram": 1, "repetition_penalty": 0.8, "suppressed": [3]},
    {"beam": 3, "banned_sequences": [[4, 6], [5, 8, 7], [3, 3]], "suppressed_first": [4, 6, 9, 11]},
    {"sample": True, "seed": 9, "banned_sequences": [[i, j] for i in range(3, 9) for j in range(3, 20)]},
    {"beam": 2, "max_length_factor": 3.1, "suppressed_first": [5], "forced_first": [7], "max_new_tokens": None},
]


@pytest.fixture(scope="module", params=in_pairs(["encoder-decoder", "decoder"], ["portable", "cpu", "search"]))
def pair(request, tmp_path_factory):
    """MLX's model and a runtime of the same."""
    architecture, kind = request.param
    folder = tmp_path_factory.mktemp("pair")
    layers = {"encoder_layers": 0} if architecture == "decoder" else {}
    model, checkpoint = made(folder, **PRE_NORM, architecture=architecture, **layers)
    if kind == "search" and architecture == "encoder-decoder":
        return model, SearchModel(export_search(checkpoint, folder / "search.onnx"), threads=1)
    target = "cpu" if kind == "cpu" and architecture == "encoder-decoder" else "portable"
    return model, OnnxTransformer(export_onnx(checkpoint, folder / "onnx", target=target), threads=1)


@pytest.mark.parametrize(("options", "prefixed"), combined(REQUESTS, [False, True], step=4), ids=str)
def test_every_runtime_finds_what_mlx_finds(pair, options, prefixed):
    model, other = pair
    rng = np.random.default_rng(5)
    rows = [rng.integers(3, model.config.vocab_size, n).tolist() for n in (2, 9, 5, 1)]
    prefix = [[6], [], [12, 10], [5, 5]] if prefixed else None
    options = {"max_new_tokens": 10, **options}
    options = {name: value for name, value in options.items() if value is not None}
    found, expected = other.search(rows, prefix, **options), model.search(rows, prefix, **options)
    assert [[h.ids for h in row] for row in found] == [[h.ids for h in row] for row in expected]
    first, ends = list(options.get("forced_first", [])), options.get("end_ids", [])
    for i, (row, mlx) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose([h.score for h in row], [h.score for h in mlx], rtol=2e-5, atol=2e-5)
        for h in row:
            forced = first + (prefix[i] if prefix else [])
            assert h.ids[: len(forced)] == forced
            assert not {*h.ids[len(forced) :]} & {*ends, *options.get("suppressed", [])}


def test_a_packages_own_settings_are_its_defaults(checkpoint, tmp_path):
    case = next(c for c in GOLDEN["cases"] if c["settings"]["num_beams"] == 4 and "repetition_penalty" in c["settings"])
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (theirs / name).write_bytes((TESTS / "decoding" / "rules_model" / name).read_bytes())
    (theirs / "generation_config.json").write_text(json.dumps(case["settings"]))
    import_huggingface(theirs, tmp_path / "ours")
    package = export_onnx(tmp_path / "ours", tmp_path / "package")
    file = SearchModel(export_search(tmp_path / "ours", tmp_path / "search.onnx"), threads=1)
    for model in (OnnxTransformer(package, threads=1), file):
        assert model.generation["beam"] == 4
        assert model.generate(GOLDEN["ids"]) == case["tokens"]
    longest = max(map(len, GOLDEN["ids"]))
    ids = np.array([row + [39] * (longest - len(row)) for row in GOLDEN["ids"]])
    (sequences,) = file.session.run(["sequences"], {"input_ids": ids, "attention_mask": (ids != 39).astype(np.int64)})
    assert [[id for id in row[0].tolist() if id != 39] for row in sequences] == case["tokens"]
    shown = json.loads((package / "generation_config.json").read_text())
    assert shown["num_beams"] == 4
    assert shown["repetition_penalty"] == case["settings"]["repetition_penalty"]
    (package / SETTINGS).write_text('{"beam": "x"}')
    (package / "manifest.json").unlink()
    with pytest.raises(UserError, match="beam='x' must be a whole number"):
        OnnxTransformer(package, threads=1).generate(GOLDEN["ids"])
