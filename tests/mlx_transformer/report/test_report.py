"""The page about training runs."""

import json
import re

import pytest
from standalone_page import read
from tiny_run import metrics, recipe

from mlx_transformer.cli import main
from mlx_transformer.report.training_page import DRAWN, page, read_run
from mlx_transformer.system.chart import MOST_POINTS, figure, thinned
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.trainer import Trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for name, options in {"first": {}, "second": {"learning_rate": 1e-3, "seed": 2}}.items():
        Trainer(recipe(folder, steps=6, valid_every=2, valid_sentences=2, **options), folder / name).run()
    return folder


def test_curves_samples_and_facts_of_both(runs):
    logs = [read_run(runs / name) for name in ("first", "second")]
    text = page(logs)
    said = read(text)
    assert "http" not in text
    for word in ("2 runs", "first", "second", "parameters", "9,600", "BLEU", "learning rate", "norm of the gradient"):
        assert word in said
    entries = metrics(runs / "first", "train")
    assert logs[0].train["loss"] == [(entry["step"], entry["loss"]) for entry in entries]
    assert text.count("<polyline") == 2 * text.count("<svg")
    assert f"first, step 6: {entries[-1]['loss']:.6g}" in said
    # What differs between their recipes comes first, and stands out.
    marked = re.findall(r"<tr class=differs><th scope=.row.>([^<]*)", text)
    assert sorted(marked) == ["training.learning_rate", "training.seed"]
    samples = metrics(runs / "first", "samples")
    assert [entry["step"] for entry in samples] == [2, 4, 6]
    assert samples[0]["samples"][0].keys() == {"source", "output", "reference"}
    assert samples[0]["samples"][0]["source"] in said


def test_strange_names_and_texts_are_shown_as_they_are(runs, tmp_path):
    folder = tmp_path / "<b>&"
    folder.mkdir()
    (folder / "run.json").write_bytes((runs / "first" / "run.json").read_bytes())
    sample = {"kind": "samples", "step": 1, "samples": [{"source": "<script>", "output": "&amp;", "reference": "x"}]}
    lines = [
        json.dumps(sample),
        '{"kind": "train", "step": 1, "loss": NaN}',
        '{"kind": "skipped", "step": 2}',
        "[1]",
        "{",
    ]
    lines += ['{"kind": "train", "step": 3, "loss": 2.5, "gradient_norm": Infinity}', '{"kind": "tr']
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    log = read_run(folder)
    assert (log.train, log.skipped, log.steps) == ({"loss": [(3, 2.5)]}, 1, 3)
    said = read(page([log]))
    assert "<b>&" in said
    assert "<script>" in said
    assert "&amp;" in said


def test_a_run_that_has_not_begun(runs, tmp_path):
    (tmp_path / "run.json").write_bytes((runs / "first" / "run.json").read_bytes())
    assert "One run" in read(page([read_run(tmp_path)]))


def test_charts():
    assert thinned([(i, 1.0) for i in range(MOST_POINTS)]) == [(i, 1.0) for i in range(MOST_POINTS)]
    long = thinned([(i, float(i)) for i in range(10 * MOST_POINTS)])
    assert len(long) <= MOST_POINTS + 1
    assert long[-1] == (10 * MOST_POINTS - 1, 10 * MOST_POINTS - 1)
    curves = [[(1, 0.0)], [(1, 2.0), (2, 2.0)], [(1, 1e-9), (2, 1e9)], [(1, -5.0), (9, 5.0)], [(1, 0.5), (2, 0.7)]]
    curves += [
        [(1, 2.0**63)],
        [(1, 2.0**63), (2, 2.0**63 + 2048)],
        [(1, -DRAWN), (2, DRAWN)],
        [(1, 1e-300), (2, DRAWN)],
    ]
    for curve in curves:
        for logarithmic in (False, True):
            drawn = figure("x", [(0, "run", curve)], logarithmic)
            assert "nan" not in drawn
            heights = [float(y) for y in re.findall(r"[\d.]+,([\d.-]+)", re.search(r'points="([^"]*)"', drawn)[1])]
            assert all(0 <= height <= 220 for height in heights)
            assert drawn.count('class="grid"') <= 21


def test_numbers_that_no_axis_has_room_for(runs, tmp_path):
    """Whole numbers of JSON have no largest one."""
    (tmp_path / "run.json").write_bytes((runs / "first" / "run.json").read_bytes())
    lines = [f'{{"kind": "train", "step": {i + 1}, "peak_memory_mb": {1 << 63}}}' for i in range(3)]
    lines += [f'{{"kind": "train", "step": 4, "loss": {value}}}' for value in ("1" * 400, "1e308", "-1e308", "2")]
    lines += ['{"kind": "train", "step": Infinity, "loss": 3}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    log = read_run(tmp_path)
    assert log.train == {"peak_memory_mb": [(step, 2.0**63) for step in (1, 2, 3)], "loss": [(4, 2.0)]}
    assert page([log]).count("<polyline") == 2


def test_on_the_command_line(runs, tmp_path, capsys):
    main(["report", str(runs / "first"), str(runs / "second"), "--out", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}: first (6 steps), second (6 steps)\n"
    assert "2 runs" in read((tmp_path / "page.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, r"no run \(no run\.json in it\); give the folder of a training run"),
        ("{", "not JSON"),
        ("{}", r"run\.json: damaged"),
        ('{"config": {"vocab_size": 9}, "recipe": 3}', r"run\.json: damaged"),
    ],
)
def test_refused(record, message, tmp_path):
    if record is not None:
        (tmp_path / "run.json").write_text(record)
    with pytest.raises(UserError, match=message):
        read_run(tmp_path)
