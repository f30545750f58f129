"""The report as a page that needs nothing else; no false alarm on a few random models (`make false-alarms`: 200)."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from false_alarms import runs
from mutation_run import SEED, all_mutations, make_models, mutated
from random_models import write_model
from small_models import configs

from export.validate import compare, compare_engines
from export.validate.cases import grid
from export.validate.engines import open_engine
from mlx_transformer.spec.checkpoint import open_checkpoint


def page(report, folder: Path) -> str:
    report.write_html(folder / "deep" / "report.html")
    return (folder / "deep" / "report.html").read_text(encoding="utf-8")


def test_the_page_of_an_equal_model_is_complete_and_loads_nothing(tmp_path: Path) -> None:
    report = compare(*write_model(configs()["paper"], tmp_path, 1), seed=1, threads=1)
    text = page(report, tmp_path)
    assert "<h1>Equal</h1>" in text
    assert text.count("<svg") == len(report.runtimes)
    for title in ("Error against budget", "Worst elements", "Weights", "Structure", "Tokens", "Where it ran", "Inputs"):
        assert f"<h2>{title}</h2>" in text
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(|<script", text)
    assert all(check.digest[:16] in text for check in report.weights)


def test_the_page_of_a_mismatch_names_the_culprit_and_shows_tokens_side_by_side(tmp_path: Path) -> None:
    mutation = all_mutations()["onnxruntime", "scale 1 / d_k"]
    checkpoint, exported = make_models(tmp_path / "models")[mutation.model]
    report = compare(checkpoint, mutated(exported, mutation, tmp_path), ["onnxruntime"], SEED, threads=1)
    text = page(report, tmp_path)
    assert "<h1>Mismatch</h1>" in text
    assert "culprit: encoder.layers.0.self_attention: scores: Q K^T / sqrt(d_k)" in text
    assert "class=parts" in text
    assert 'class="over"' in text
    assert any(check.partings for check in report.tokens)


def test_random_models_are_found_equal() -> None:
    for config, choices, report in runs(4, seed=5):
        assert report.equal, (config, choices, report.seed, report.failures())


def test_rows_in_another_order_are_found_equal(tmp_path: Path) -> None:
    checkpoint, exported = write_model(configs()["modern"], tmp_path, 1)
    opened = open_checkpoint(checkpoint)
    cases = []
    for case in grid(opened.config, 3):
        order = np.random.default_rng(1).permutation(len(case.ids))
        mask = None if case.mask is None else case.mask[order]
        targets = None if case.target_ids is None else case.target_ids[order]
        cases.append(replace(case, ids=case.ids[order], mask=mask, target_ids=targets))
    engines = [open_engine(name, opened, exported, 1) for name in ("mlx", "onnxruntime")]
    report = compare_engines(opened, engines, cases)
    assert report.equal, report.failures()
