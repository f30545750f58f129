"""The report as a page that needs nothing else; no false alarm on a few random models (`make false-alarms`: 200)."""

import io
import json
import re
from dataclasses import replace
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
from mlx_transformer.system.chart import COLOURS


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


def section(text: str, title: str) -> str:
    return text.partition(f"<h2>{title}</h2>")[2].partition("<h2>")[0]


def test_the_worst_elements_are_sorted_by_their_budget(mismatch, tmp_path: Path) -> None:
    table = section(page(mismatch, tmp_path), "Worst elements")
    rows = re.findall(r'<tr><td class="n"><span class="(\w+)">([^<]+)</span></td><td>(\w+)</td>', table)
    shares = [float(share) for _, share, _ in rows]
    assert shares == sorted(shares, reverse=True)
    assert [(mark, runtime) for mark, _, runtime in rows] == [("bad", "onnxruntime")] * 6 + [("good", "mlx")] * 6


def test_each_line_of_a_plot_has_a_colour_and_a_word_of_its_own(mismatch, tmp_path: Path) -> None:
    text = page(mismatch, tmp_path)
    css, plots = text.partition("</style>")[0], section(text, "Error against budget")
    for scheme in css.split("prefers-color-scheme"):
        shades = re.findall(r"--s\d: ?(#\w+)[;}]", scheme)
        assert len(shades) == len(set(shades)) == COLOURS
    named: dict[str, set[str]] = {}
    for chart, runtime in zip(plots.split("<svg")[:-1], mismatch.runtimes, strict=True):
        legend = re.findall(r'<span><i style="background:(var\(--s\d\))"></i>([^<]+)</span>', chart)
        paths = {point.path for point in mismatch.points if point.runtime == runtime.name}
        assert {path for _, words in legend for path in words.split(" = ")} == paths
        assert len({shade for shade, _ in legend}) == len(legend)
        for shade, words in legend:
            named.setdefault(shade, set()).add(words.split(" = ")[0])
    assert all(len(first) == 1 for first in named.values()), "the same way has the same colour in every plot"


def test_dots_of_one_point_stand_apart(mismatch, tmp_path: Path) -> None:
    for chart in section(page(mismatch, tmp_path), "Error against budget").split("<svg")[1:]:
        dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', chart)
        assert len(dots) == len(set(dots)) > 10


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


def test_many_runtimes_have_tables_of_their_own(mismatch) -> None:
    names = [f"onnxruntime:cpu:all:int8-{n}" for n in range(5)]
    runtimes = tuple(replace(mismatch.runtimes[1], name=name) for name in names)
    points = [point for point in mismatch.points if point.runtime == "onnxruntime"]
    many = replace(mismatch, runtimes=runtimes, points=[replace(p, runtime=n) for n in names for p in points])
    shown = io.StringIO()
    many.print(Console(width=80, file=shown))
    text, worst = shown.getvalue(), points[1].worst
    assert "\u2026" not in text
    assert text.count(f"{worst.rms_ratio:.2e} {worst.max_ratio:.2e}") == len(names)
    assert text.count(" tap ") > 1


def test_random_models_are_found_equal() -> None:
    for config, choices, report in runs(1, seed=5):
        assert report.equal, (config, choices, report.seed, report.failures())
