"""The report as a page that needs nothing else; no false alarm on a few random models (`make false-alarms`: 200)."""

import io
import json
import re
from pathlib import Path

import pytest
from false_alarms import runs
from mutation_run import SEED, all_mutations, make_models, mutated
from random_models import write_model
from rich.console import Console
from runtimes import unasked
from small_models import configs
from standalone_page import read

from export.validate import compare, validate_command
from export.validate.findings import TAPPED
from mlx_transformer.system import progress as terminal


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
    by = ", ".join(unasked())
    assert repr(report) == f"Report(equal: {report.checkpoint}, {report.onnx}, by {by}); .print() shows more"
    shown = read(report._repr_html_())
    assert shown.startswith("validate: equal")
    for name in ("mlx", "onnxruntime"):
        compared = sum(point.inputs for point in report.points if point.runtime == name)
        assert re.search(rf"{name}\d+ weights bit for bit, {compared:,} tensors, at most 0\.\d+ of the budget", shown)


@pytest.mark.slow
def test_files_are_written_though_nobody_reads_the_terminal_any_more(tmp_path: Path) -> None:
    """As behind `| head`."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    files = {"json": tmp_path / "report.json", "html": tmp_path / "report.html"}
    model = write_model(configs()["modern"], tmp_path, 1)
    with pytest.raises(BrokenPipeError):
        validate_command(*model, **files, runtimes=["onnxruntime"], console=terminal.Console(file=Closed()))
    assert json.loads(files["json"].read_text(encoding="utf-8"))["verdict"] == "equal"
    assert files["html"].read_text(encoding="utf-8").startswith("<!")


@pytest.fixture(scope="module")
def mismatch(tmp_path_factory):
    """Of a wrong ONNX model, beside MLX, which is healthy."""
    folder = tmp_path_factory.mktemp("mismatch")
    mutation = all_mutations()["onnxruntime", "scale 1 / d_k"]
    checkpoint, exported = make_models(folder / "models", [mutation.model])[mutation.model]
    return compare(checkpoint, mutated(exported, mutation, folder), ["mlx", "onnxruntime"], SEED, threads=1)


def test_the_page_of_a_mismatch_names_the_culprit_and_shows_tokens_side_by_side(mismatch, tmp_path: Path) -> None:
    report, text = mismatch, page(mismatch, tmp_path)
    assert "<h1>Mismatch</h1>" in text
    assert "culprit: encoder.layers.0.self_attention: scores: Q K^T / sqrt(d_k)" in text
    assert "class=parts" in text
    assert 'class="over"' in text
    assert any(check.divergences for check in report.tokens)
    shown = read(report._repr_html_())
    assert shown.startswith("validate: mismatchfailureonnxruntime: first over budget: ")
    assert "culprit: encoder.layers.0.self_attention: scores: Q K^T / sqrt(d_k)" in shown
    assert shown.count("not all the same") == 1


@pytest.mark.parametrize("width", [50, 80, 120])
def test_no_figure_is_cut_on_the_terminal_and_mismatches_come_first(mismatch, width: int) -> None:
    shown = io.StringIO()
    mismatch.print(Console(width=width, file=shown))
    text = shown.getvalue()
    assert "\u2026" not in text
    for point in mismatch.points:
        if point.path == TAPPED and point.worst.deviation.same_bits is None:
            ratios = point.worst.rms_ratio, point.worst.max_ratio
            assert " ".join(f"{x:5.2f}" if x < 1000 else f"{x:.2e}" for x in ratios) in text
    for check in mismatch.tokens:
        assert check.passed or f"{len(check.problems)} differ" in text
    rows = [line for line in text.partition("onnxruntime, rms and")[2].splitlines() if line.count(".") > 1]
    marks = ["\u2717" in line for line in rows if "enc" in line or "dec" in line]
    assert marks == sorted(marks, reverse=True)


@pytest.mark.slow  # test_all_configs.py has every option in each run
def test_random_models_are_found_equal() -> None:
    for config, choices, report in runs(1, seed=5):
        assert report.equal, (config, choices, report.seed, report.failures())
