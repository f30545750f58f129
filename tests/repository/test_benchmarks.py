"""The benchmarks: figures that follow from made-up measurements, command lines that are understood or refused."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import translate
from engines import CLASSES, DEFAULTS, Engine, parse, tables
from engines.floor import Shape
from engines.measure import Cell, Measured, Task

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
B1, B8, B8X4 = Cell(1, 1), Cell(8, 1), Cell(8, 4)
OURS, PLAIN, HALVES = "ours:cpu:float32", "ct2:float32", "ct2:float32:2x1"


def script(name):
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def measured(seconds, outputs=None, **more):
    return Measured(load=0.5, resident=10**6, seconds=seconds, outputs=outputs or {}, **more)


# ---- command lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    out, error = capsys.readouterr()
    assert ended.value.code == 0
    assert out.startswith(f"usage: {name}.py")
    assert error == ""


@pytest.mark.parametrize("text", DEFAULTS)
def test_default_engines_are_specs(text):
    engine_name = parse(text)
    assert (engine_name.text, engine_name.parts) == (text, text.split(":"))
    assert engine_name.family in CLASSES
    assert engine_name.precision in ("float32", "int8")
    assert engine_name.is_peer == (engine_name.family not in ("ours", "loop"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("theirs:float32", "expected ours:TARGET:PRECISION"),
        ("", "expected ours:TARGET:PRECISION"),
        ("ours", "expected ours:TARGET:PRECISION"),
        ("ours:cpu", "expected ours:TARGET:PRECISION"),
        ("ours:cpu:int8:float32:more", "expected ours:TARGET:PRECISION"),
        ("loop::int8", "expected ours:TARGET:PRECISION"),
        ("torch:float32:2x1", "expected ours:TARGET:PRECISION"),
        ("ct2", "expected ours:TARGET:PRECISION"),
        ("ct2:int8:3x1", "the layout must be 1x1, 1x2, 1x2-unbound or 2x1"),
    ],
)
def test_other_engines_are_refused_in_one_line(text, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["translate.py", "--engines", "ct2:int8", text])
    assert translate.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"translate.py: engine {text!r}: ")
    assert message in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("text", ["8", "b", "b0", "b8x", "b8x0", "bx4", "b-1"])
def test_cells(text, monkeypatch, capsys):
    assert [Cell.parse(cell) for cell in ("b1", "b8", "b8x4")] == [B1, B8, B8X4]
    assert [str(cell) for cell in (B1, B8X4)] == ["b1", "b8 beam 4"]
    monkeypatch.setattr(sys, "argv", ["translate.py", "--cells", text])
    assert translate.main() == 2
    assert (
        capsys.readouterr().err == f"translate.py: cell {text!r}: expected b8 for batches of 8, or b8x4 for 4 beams\n"
    )


@pytest.mark.parametrize("family", CLASSES)
def test_every_engine_has_the_methods_that_are_called(family):
    """Read, not imported: most need packages of peers."""
    module, name = CLASSES[family]
    tree = ast.parse((BENCHMARKS / "engines" / f"{module}.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = [base.id for base in classes[name].bases]
    methods = {
        node.name: [argument.arg for argument in node.args.args]
        for owner in (*bases, name)
        for node in classes[owner].body
        if isinstance(node, ast.FunctionDef)
    }
    for method in ("__init__", "translate"):
        code = getattr(Engine, method).__code__
        assert methods[method] == list(code.co_varnames[: code.co_argcount])


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_ratios_are_medians_of_ratios_of_one_round():
    """By hand: in b1 1/2, 2/1 and 9/3, so 2, and 2, 8 and 12 against the halves; in b8 1/2, and 1/4 against them."""
    results = {
        PLAIN: measured({B1: [1, 2, 9], B8: [1, 2, 3]}),
        HALVES: measured({B1: [4, 8, 36], B8: [0.5, 1, 1.5]}),
        "ct2:int8": measured({B1: [9, 9, 9], B8: [9, 9, 9]}),
        OURS: measured({B1: [2, 1, 3], B8: [2, 4, 6]}),
    }
    specs = {name: parse(name) for name in results}
    header, rule, *lines = tables.ratios(results, [B1, B8], specs)
    assert cells_of(header) == ["x the fastest layout of CTranslate2", "b1", "b8", "geometric mean", "least"]
    assert rule == "|-|-|-|-|-|"
    found = {name: values for name, *values in map(cells_of, lines)}
    assert found == {
        PLAIN: ["1.00", "0.50", "0.71", "0.50"],
        HALVES: ["0.25", "1.00", "0.50", "0.25"],
        "ct2:int8": ["1.00", "1.00", "1.00", "1.00"],
        OURS: ["2.00", "0.25", "0.71", "0.25"],
    }
    alone = {name: results[name] for name in ("ct2:int8", OURS)}
    assert [cells_of(line)[0] for line in tables.ratios(alone, [B1, B8], specs)[2:]] == ["ct2:int8"]
    assert tables.ratios({OURS: results[OURS]}, [B1, B8], specs) == []


def test_speeds_count_the_eos_that_the_model_wrote():
    results = {OURS: measured({B8: [0.5, 2, 0.25]}, {B8: [[5, 6, 7], [8]]})}
    forced, free = Task([[3, 2]] * 2, 4, {}), Task([[3, 2]] * 2, None, {})
    assert cells_of(tables.speeds(results, [B8], forced)[-1]) == [OURS, "8"]
    assert cells_of(tables.speeds(results, [B8], free)[-1]) == [OURS, "12"]


def test_identical_sentences_are_counted_beam_by_beam():
    reference = {B1: [[1], [2]], B8: [[1], [2], [3]], B8X4: [[4], [5]]}
    ours = {B1: [[1], [9]], B8: [[1], [2], [3, 3]], B8X4: [[5], [4]]}
    results = {
        PLAIN: measured({}, reference, first=0.0021, peak=5 * 10**6),
        OURS: measured({}, ours, taught=0.975),
    }
    bleu = {PLAIN: {1: 30.0, 4: 31.5}, OURS: {1: 29.994, 4: 31.5}}
    header, _, first, second = map(cells_of, tables.properties(results, [B1, B8, B8X4], PLAIN, bleu))
    assert header[5:] == [
        *(f"sentences identical to {PLAIN}, {search}" for search in ("greedy", "beam 4")),
        "next token agrees",
        *("BLEU, greedy", "BLEU, beam 4"),
    ]
    assert first == [PLAIN, "0.50", "1", "5", "2.1", "5 of 5", "2 of 2", "", "30.00", "31.50"]
    assert second == [OURS, "0.50", "1", "0", "0.0", "3 of 5", "0 of 2", "97.5 %", "29.99", "31.50"]
    assert len(cells_of(tables.properties(results, [B1], PLAIN, None)[0])) == 7


def test_share_of_the_floor():
    """One layer of D 2, F 3: 36 weights of the encoder, 36 + 2 * 5 of a step; at 1 operation/s reading is no bound."""
    shape, rates = Shape(1, 2, 3, 5), {"float32": {"gemm": 1.0, "bandwidth": 1e9}}
    assert shape.weights() == (36, 46)
    least = 2 * 36 * 2 * 3 + 4 * 2 * 46 * 2  # two sources of 3 tokens, four steps of two rows
    assert shape.seconds("float32", rates["float32"], 2, 1, 3, 4) == least
    slow = {"gemm": 1e9, "bandwidth": 0.5}
    assert shape.seconds("float32", slow, 2, 1, 3, 4) == 8 * 36 + 4 * 8 * 46
    assert shape.seconds("int8", slow, 2, 4, 3, 4) == 2 * 36 + 4 * 2 * 46
    cell, task = Cell(2, 1), Task([[3, 4, 2]] * 4, 4, {})
    results = {OURS: measured({cell: [4 * least]}, {cell: [[5] * 4] * 4}), "ours:cpu:int4": measured({cell: [1]})}
    specs = {name: parse(name) for name in results}
    _, _, *lines = tables.floors(results, [cell], specs, shape, rates, task)
    assert [cells_of(line) for line in lines] == [[OURS, "50 %"]]


def test_training_s_ratios_are_of_one_round():
    training = script("training")
    speeds = {"ours": [2.0, 1.0, 30.0], "PyTorch": [1.0, 2.0, 10.0]}
    rows = training.rows("tiny", speeds, {"ours": 5, "PyTorch": 7.4})
    assert cells_of(rows[0]) == ["tiny", "ours", "2", "2.00", "5"]
    assert cells_of(rows[1]) == ["tiny", "PyTorch", "2", "1.00", "7"]
    assert training.rows("tiny", {"ours": [1500.4]}, {"ours": 1e4}) == ["| tiny | ours | 1,500 |  | 10,000 |"]


def test_exports_are_judged_by_their_largest_peak(monkeypatch, capsys):
    export = script("exporting")
    times = [(3.0, 1.0, 100e6), (1.0, 2.0, 151e6), (2.0, 9.0, 1.0)]
    rounds = [dict(zip(("seconds", "cpu", "peak"), values, strict=True)) for values in times]
    row = export.row("x", rounds, 50_000_000, 100_000_000)
    assert cells_of(row) == ["x", "2.0", "2.0", "151", "1.51", "50", "0.50"]
    assert not export.allowed("ours:cpu:int8", rounds, 100_000_000)
    assert export.allowed("ours:cpu:int8", rounds, 101_000_000)
    assert export.allowed("Optimum, four graphs", rounds, 1)
    monkeypatch.setattr(sys, "argv", ["exporting.py", "--exports", "cpu"])
    with pytest.raises(SystemExit, match="2"):
        export.main()
    assert "--exports cpu: expected TARGET:PRECISION" in capsys.readouterr().err


def test_latencies_of_the_server():
    row = cells_of(script("serve").row("8 clients", 123.4, [i / 1000 for i in range(101, 0, -1)]))
    assert row == ["8 clients", "123", "51.0", "100.0"]


def test_ratios_in_the_browser_are_those_of_rounds():
    web = script("web")
    ours = {"loads": [9.0, 1.24, 1.1], "memory": 24e6, "ids": [[1]], "rounds": [[100, 1.0], [100, 2.0], [100, 0.1]]}
    peer = {"loads": [2.0], "memory": 99.6e6, "ids": [[1]], "rounds": [[100, 2.0], [100, 2.0], [100, 1.0]]}
    engines = {web.PEER: peer, "page": ours, "page, beam 4": {**ours, "ids": [[2]]}}
    assert cells_of(web.row("page", ours, peer)) == ["page", "1.2", "24", "100", "2.00"]
    assert web.table(1, engines).count("\n|") == 5
    assert web.agree(engines)
    assert not web.agree({**engines, "page": {**ours, "ids": [[3]]}})


def test_slopes_are_those_of_powers():
    n = np.array([256.0, 512, 1024])
    fitted, last = script("attention").slopes(np.stack([n, 3 * n**2, 5 * n, n**1.5], axis=1))
    np.testing.assert_allclose(fitted, [2, 1, 1.5])
    np.testing.assert_allclose(last, [2, 1, 1.5])


@pytest.mark.slow
def test_attention_grows_with_the_square_of_the_length(monkeypatch, capsys):
    """Measured, by the benchmark's own table: stored weights of (H, n, n), on a CPU in the fused form too. How time
    grows is for the benchmark to say: on a busy machine a test would measure the machine."""
    attention = script("attention")
    monkeypatch.setattr(attention, "CPU", True)
    monkeypatch.setattr(attention, "LENGTHS", (256, 512, 1024))
    with mx.stream(mx.cpu):
        attention.print_growth(0.2)
    lines = [cells_of(line) for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines] == ["n", "256", "512", "1024", "fitted slope", "slope of the last doubling"]
    times, megabytes = np.array([line[1:3] for line in lines[1:]], float), np.array([l[3:] for l in lines[1:]], float)
    assert (times[:3] > 0).all(), times
    logarithms = np.log(np.array([256, 512, 1024]))
    fits = [np.polyfit(logarithms, np.log(column), 1)[0] for column in times[:3].T]
    np.testing.assert_allclose(times[3], fits, atol=0.1)  # of the times above it, printed in hundredths of a ms
    # The scores, H n n float32, and what is linear in n.
    scores = 4e-6 * attention.HEADS * np.array(attention.LENGTHS)[:, None] ** 2
    rest = megabytes[:3] - scores
    assert (rest >= 0).all(), megabytes
    # Four times as much for four times the length, and twice that or half where an input's buffer is reused in one
    # measurement and not in another; sixteen times if it were of (n, n).
    assert ((rest[2] / rest[0] > 1.9) & (rest[2] / rest[0] < 8.2)).all(), megabytes
    assert (megabytes[-1] > 1.4).all(), megabytes  # 1 if all were linear, 1.58 with such a buffer at 512 alone
