"""The benchmarks' measuring side: engines take turns in processes of their own, and failures are named."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import translate
from engines import parse
from engines.measure import Cell, Measured, Task, measure, teach
from engines.models import PreparationError
from engines.process import EngineError, Worker

B1, B8, B8X4 = Cell(1, 1), Cell(8, 1), Cell(8, 4)
OURS, PLAIN = "ours:cpu:float32", "ct2:float32"


class Fake:
    """An engine that answers with its sources' first token again and again; it takes `seconds` for each batch."""

    loaded = {"load": 0.25, "resident": 7}  # noqa: RUF012

    def __init__(self, seconds=1.0, change=lambda output: output, fails_at=None):
        self.seconds, self.change, self.fails_at, self.calls = seconds, change, fails_at, []

    def translate(self, batches, beam, length, limit=100, prefix=None, timed=False, warm=False):
        self.calls.append((len(batches), beam, timed, warm))
        if len(self.calls) == self.fails_at:
            raise EngineError("it is tired")
        rows = [row for batch in batches for row in batch]
        return self.seconds * len(batches), [self.change([row[0]] * (length or 3)) for row in rows]

    def peak(self):
        return 99

    def close(self):
        pass


def test_engines_take_turns_and_failures_are_named():
    task = Task([[i, 2] for i in range(10, 20)], 4, {1: 5})
    assert task.chosen(B1) == [0, 2, 4, 6, 8]
    assert [len(batch) for batch in task.batches(B8X4)] == [8, 2]
    workers = {"good": Fake(2.0), "tired": Fake(fails_at=4), "short": Fake(change=lambda output: output[1:])}
    found, failed = measure(workers, task, [B1, B8X4], rounds=3)
    assert failed == {"tired": "b8 beam 4: it is tired", "short": "b1: outputs of [3] tokens, not 4"}
    assert list(found) == ["good"]
    good = found["good"]
    assert good.seconds == {B1: [10.0] * 3, B8X4: [4.0] * 3}
    assert good.outputs[B1] == [[i] * 4 for i in (10, 12, 14, 16, 18)]
    assert (good.load, good.resident, good.peak, good.first) == (0.25, 7, 99, 2.0)
    timed = [call for call in workers["good"].calls if call[2]]
    assert timed == [(*work, True, turn == 0) for turn in range(3) for work in ((5, 1), (2, 4))]


def test_agreement_with_a_teacher():
    """One engine is wrong at every position, one at those of every other sentence, one can't be told."""
    task = Task([[i, 2] for i in range(10, 14)], 6, {})
    workers = {
        "reference": Fake(),
        "wrong": Fake(change=lambda output: [0] * len(output)),
        "half": Fake(change=lambda output: output if output[0] % 2 else [0] * len(output)),
        "deaf": Fake(fails_at=2),
    }
    assert teach(workers, "reference", ["wrong", "half", "deaf"], task) == {"wrong": 0.0, "half": 0.5}


def test_a_whole_comparison(monkeypatch, capsys, tmp_path):
    """What is printed and kept, with engines of which one can't be prepared and one fails."""
    marian = tmp_path / "small" / "marian"
    marian.mkdir(parents=True)
    sizes = dict(encoder_layers=1, d_model=2, encoder_ffn_dim=3, vocab_size=50, eos_token_id=0, model_type="marian")
    (marian / "config.json").write_text(json.dumps(sizes))

    class Preparation(SimpleNamespace):
        def __init__(self, models, python):
            super().__init__(published=models / "marian")

        def random(self, size):
            pass

        def folder(self, engine_name):
            if engine_name.family == "optimum":
                raise PreparationError("no such interpreter")
            return tmp_path

    fakes = {PLAIN: Fake(3.0), OURS: Fake(2.0), "loop:cpu:int8": Fake(fails_at=1)}
    monkeypatch.setattr(translate, "Preparation", Preparation)
    monkeypatch.setattr(translate, "Worker", lambda engine_name, *_: fakes[engine_name.text])
    monkeypatch.setattr(translate, "floor_rates", lambda *_: {"gemm": 1e9, "bandwidth": 1e9})
    kept = tmp_path / "kept.json"
    arguments = ["--engines", *fakes, "optimum:float32", "--sizes", "small", "--cells", "b1", "b8x4", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["translate.py", *arguments, "--models", str(tmp_path), "--json", str(kept)])
    assert translate.main() == 1
    out = capsys.readouterr().out
    assert "### small\n\n| target tokens/s | b1 | b8 beam 4 |\n" in out
    assert f"| {OURS} | 16 | 128 |\n" in out  # 32 tokens of 1 and of 8 sentences in 2 s
    assert f"| {OURS} | 1.50 | 1.50 | 1.50 | 1.50 |\n" in out
    assert f"| {OURS} | 0.25 | 0 | 0 | 2000.0 | 12 of 12 | 32 of 32 |\n" in out
    assert "\nNot measured: optimum:float32: no such interpreter\n" in out
    assert "\nNot measured: loop:cpu:int8: b1: it is tired\n" in out
    entry = json.loads(kept.read_text(encoding="utf-8"))
    assert (entry["model"], entry[OURS]["median"]) == ("small", {"b1": 24.0, "b8 beam 4": 8.0})


def test_a_text_is_sorted_with_its_references(text_folder, tmp_path):
    (tmp_path / "text").write_text("three. four five six!\none\none two three.\nx\n", encoding="utf-8")
    (tmp_path / "reference").write_text("C c c c c\nA a a a a\nB b b b b\nD\n", encoding="utf-8")
    text = translate.Text(text_folder / "model", tmp_path / "text", tmp_path / "reference", 3)
    assert list(map(len, text.sources)) == sorted(map(len, text.sources))
    assert text.references == ["A a a a a", "B b b b b", "C c c c c"]
    task = Task(text.sources, None, {1: 1})
    perfect = [row[:-1] for row in text.tokenizer.encode_batch(text.references)]
    result = Measured(0.5, 10**6, outputs={B1: [[5]], B8: perfect})
    assert text.bleu(result, [B8, B1], task) == {1: pytest.approx(100)}, "of the largest batches"


def test_sources_of_random_models(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "eos_token_id": 0}')
    rows = translate.random_sources(tmp_path)
    assert rows == translate.random_sources(tmp_path)
    assert len(rows) == 64
    assert {len(row) for row in rows} <= set(range(8, 31))
    assert all(row[-1] == 0 and min(row[:-1]) >= 3 and max(row) < 49 for row in rows)


def test_an_engine_s_process(text_folder, text_model):
    """Ours in a process of its own, stopped and let go; and one line from a process that could not begin."""
    worker = Worker(parse("ours:portable:float32"), sys.executable, text_folder / "onnx", 1)
    rows = [[5, 6, 2], [7, 2]]
    try:
        assert worker.loaded["load"] > 0
        seconds, outputs = worker.translate([rows, rows[:1]], 1, 4, warm=True)
        assert seconds > 0
        assert outputs == text_model.generate([*rows, rows[0]], max_new_tokens=4, min_new_tokens=4)
        with pytest.raises(EngineError, match="outside the vocabulary"):
            worker.translate([[[99999, 2]]], 1, 4)
        assert worker.peak() >= worker.loaded["resident"] > 0
    finally:
        worker.close()
    assert worker.process.returncode is not None
    with pytest.raises(EngineError) as caught:
        Worker(parse("ours:portable:float32"), sys.executable, text_folder / "nowhere", 1)
    assert "nowhere" in str(caught.value)
    assert "\n" not in str(caught.value)
