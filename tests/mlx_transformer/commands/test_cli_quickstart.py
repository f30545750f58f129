"""`quickstart`: how it ends, and what the same command does in a folder that has one, finished or not."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import metrics

import export.explain.command
import export.validate
from mlx_transformer import cli
from mlx_transformer.commands import quickstart
from mlx_transformer.data import built_in
from mlx_transformer.data.corpus import BuiltInCorpus
from mlx_transformer.report.training_page import read_run
from mlx_transformer.training import options
from mlx_transformer.training.progress import Dashboard

STEPS = 6
RECIPE = f"""
[data]
corpus = "cldr:en-de"
train_pairs = 200
vocab_size = 300
batch_tokens = 300
[model]
preset = "tiny"
d_model = 16
heads = 1
d_ff = 32
encoder_layers = 1
decoder_layers = 1
dropout = 0.1
[training]
steps = {STEPS}
warmup_steps = 2
valid_sentences = 0
"""


@pytest.fixture(autouse=True)
def small(tmp_path_factory, monkeypatch):
    """The recipe of that name is one of a second, with two held-out phrases of each kind."""
    recipes = tmp_path_factory.mktemp("recipes")
    (recipes / "quickstart.toml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.setattr(options, "RECIPES", recipes)
    build = built_in.build

    def few(*arguments: object) -> BuiltInCorpus:
        corpus = build(*arguments)
        return BuiltInCorpus(corpus.train, *(part.select(list(range(20))) for part in (corpus.valid, corpus.held_out)))

    monkeypatch.setattr(built_in, "build", few)


@pytest.fixture
def without_proof(monkeypatch):
    """Where another question is asked than the proof's."""
    monkeypatch.setattr(export.validate, "validate_command", lambda *_, **__: 0)
    monkeypatch.setattr(export.explain.command, "explain", lambda *_, **__: None)


@pytest.fixture
def learned(monkeypatch):
    """The scores of a model that has learned enough."""
    monkeypatch.setattr(quickstart, "score", lambda *_: {"exact_match": 80.0, "bleu": 90.0, "chrf": 90.0})


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, list[str]]:
        """The exit status, and the lines on standard error."""
        try:
            cli.main(["quickstart", *map(str, arguments)])
            status = 0
        except SystemExit as done:
            status = int(done.code or 0)
        return status, capsys.readouterr().err.splitlines()

    return call


def summary(out: str = "quickstart") -> dict:
    return json.loads(Path(out, "summary.json").read_text(encoding="utf-8"))


def interrupted(monkeypatch, at: int) -> None:
    """Ctrl-C in the next run's step `at`."""
    step = Dashboard.step

    def pressed(self, state, *rest):
        step(self, state, *rest)
        if state.step == at:
            monkeypatch.setattr(Dashboard, "step", step)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Dashboard, "step", pressed)


def raised(error: type[BaseException]) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


@pytest.mark.usefixtures("learned")
def test_whole(call):
    """With the proof; and the page says how long the run took, with more points than one each 50 steps."""
    status, said = call()
    assert status == 0, said[-1]
    made = summary()
    assert (made["validate"], made["translations_that_differ"]) == ("equal", 0)
    assert made["steps"] == made["steps_planned"] == STEPS
    log = read_run(Path("quickstart"))
    assert log.seconds is not None
    assert log.seconds >= log.train["seconds"][-1][1]
    assert [step for step, _ in log.train["loss"]] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.usefixtures("without_proof", "learned")
def test_interrupted_it_goes_on_as_if_nothing_had_been(call, monkeypatch):
    assert call("--out", "straight")[0] == 0
    interrupted(monkeypatch, at=4)
    status, said = call()
    assert status == 128 + signal.SIGINT
    assert said[-1] == f"saved at step 4 of {STEPS}; the same command goes on from there"
    assert not Path("quickstart", "summary.json").exists()

    status, said = call("--seed", 2)
    assert status == 2
    assert "--seed 1" in said[-1]

    with monkeypatch.context() as patched:  # once more, after training
        patched.setattr(export.validate, "validate_command", raised(KeyboardInterrupt))
        status, said = call()
    assert (status, said[-1]) == (130, "mlx-transformer: interrupted; the same command goes on from there")
    assert any("resumed from step-00000004" in line for line in said)

    status, said = call()
    assert status == 0
    assert said[0] == "quickstart: going on with the quickstart that was interrupted there"
    assert any(f"resumed from step-0000000{STEPS}" in line for line in said)
    assert summary()["steps"] == STEPS
    weights = [Path(out, "model", "model.safetensors").read_bytes() for out in ("straight", "quickstart")]
    assert weights[0] == weights[1]
    curves = [read_run(Path(out)).train["loss"] for out in ("straight", "quickstart")]
    assert curves[0] == curves[1]
    assert len(metrics(Path("quickstart"), "end")) == 1

    status, said = call("--seed", 2)  # a finished one is replaced
    assert status == 0
    assert said[0] == "quickstart: replacing the quickstart that was finished there"
    assert Path("quickstart", "model", "model.safetensors").read_bytes() != weights[0]


@pytest.mark.usefixtures("without_proof")
@pytest.mark.parametrize("minutes", [None, 1e-9])
def test_too_little_learned_is_no_success(call, monkeypatch, minutes):
    monkeypatch.setattr(quickstart, "score", lambda *_: {"exact_match": 79.9, "bleu": 9.0, "chrf": 9.0})
    status, said = call(*([] if minutes is None else ["--minutes", minutes]))
    assert status == 2
    facts = ["79.9 %", "80 %"]
    facts += ["--seed", f"all {STEPS} steps"] if minutes is None else ["--minutes 1e-09", f"0 of {STEPS} steps"]
    assert all(fact in said[-1] for fact in facts), said[-1]
    assert summary()["steps"] == (STEPS if minutes is None else 0)


@pytest.mark.usefixtures("without_proof")
def test_runtimes_that_differ_come_first(call, monkeypatch):
    monkeypatch.setattr(export.validate, "validate_command", lambda *_, **__: 1)
    status, said = call()
    assert status == 1
    assert "validate.html" in said[-1]


@pytest.mark.usefixtures("without_proof", "learned")
def test_what_is_refused_changes_nothing(call):
    assert call("--minutes", -1)[0] == 2
    assert not Path("quickstart").exists()
    assert call()[0] == 0
    before = {path: path.read_bytes() for path in Path("quickstart").rglob("*") if path.is_file()}
    status, said = call("--minutes", -1)
    assert status == 2
    assert "minutes" in said[-1]
    with quickstart._held(Path("quickstart")):
        status, said = call()
    assert status == 2
    assert "another quickstart is at work there" in said[-1]
    Path("quickstart", "notes.txt").write_text("mine", encoding="utf-8")
    status, said = call()
    assert status == 2
    assert "notes.txt" in said[-1]
    Path("quickstart", "notes.txt").unlink()
    assert before == {path: path.read_bytes() for path in Path("quickstart").rglob("*") if path.is_file()}


@pytest.mark.usefixtures("without_proof", "learned")
def test_what_a_killed_one_leaves_is_no_hindrance(call):
    quickstart_folder = Path("quickstart")
    quickstart_folder.mkdir()
    for name in (".quickstart", ".summary.json.999999999.tmp"):
        (quickstart_folder / name).touch()
    (quickstart_folder / "data").mkdir()
    assert call()[0] == 0
    assert not list(quickstart_folder.glob("*.tmp"))
