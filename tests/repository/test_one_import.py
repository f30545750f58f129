"""What people do with a model takes one import and at most three lines; README and pages show the same names."""

import inspect
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from imports import ROOT
from small_models import write_text_model
from waiting import PATIENCE, until

import mlx_transformer as mt
from mlx_transformer.system.errors import UserError

LINES = ["one two", "three. four"]
TASKS = {
    "load": """
        model, tokenizer = mt.load("run")
        print(model.config.d_model, len(tokenizer.encode("one")))
    """,
    "translate": """
        model = mt.open_model("run")
        print(model.translate("one two", beam=4))
    """,
    "stream": """
        for piece in mt.open_model("onnx").stream("one two"):
            print(piece, end="")
    """,
    "n best": """
        for translation in mt.open_model("run").n_best("one two", beam=4, n_best=2):
            print(translation.score, translation.text)
    """,
    "train": """
        result = mt.train(source="train.en", target="train.de", out="mine", **keys)
        print(result.model)
    """,
    "save": """
        model, _ = mt.load("run")
        print(model.save("copy"))
    """,
    "export": """
        print(mt.export_onnx("run", "exported"))
        print(mt.OnnxTransformer("exported").translate(["one two"]))
    """,
    "prove": """
        report = mt.validate("run", "onnx")
        report.print()
    """,
    "compare": """
        found = mt.compare("run", "onnx", lines)
        print(found.lines, len(found.sentences))
    """,
    "serve": """
        mt.serve("onnx", port=port)
    """,
}
KEYS = {"vocab_size": 280, "preset": "tiny", "steps": 2, "batch_tokens": 200, "d_model": 16, "heads": 2, "d_ff": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """run: a checkpoint, onnx: its export; and parallel text."""
    folder = write_text_model(tmp_path_factory.mktemp("tasks"))
    (folder / "model").rename(folder / "run")
    for name in ("train.en", "train.de"):
        (folder / name).write_text("one two three\nfour five\n" * 100)
    return folder


def code_of(task: str) -> str:
    return "import mlx_transformer as mt\n" + inspect.cleandoc(TASKS[task])


def test_each_task_takes_one_import_and_at_most_three_lines():
    assert len(TASKS) == 10
    for task in TASKS:
        lines = code_of(task).splitlines()
        assert len(lines) <= 3, task
        assert [line for line in lines if "import" in line] == lines[:1], task


@pytest.mark.parametrize("task", [task for task in TASKS if task != "serve"])
def test_a_task(task, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    exec(code_of(task), {"__name__": "script", "keys": KEYS, "lines": LINES})
    assert capsys.readouterr().out.strip()


def test_serving(place):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = code_of("serve").replace("port=port", f"port={port}")
    server = subprocess.Popen([sys.executable, "-c", code], cwd=place, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.communicate()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_both_runtimes_have_the_same_verbs(place):
    models = [mt.open_model(place / "run"), mt.open_model(place / "onnx")]
    one, several = ([model.translate(text, max_new_tokens=8) for model in models] for text in (LINES[0], LINES))
    assert one == [several[0][0]] * 2
    assert several[0] == several[1]
    assert "".join(models[0].stream(LINES[0], max_new_tokens=8)) == one[0]
    ids = models[0].tokenizer.encode_batch(LINES)
    assert models[0].generate(ids, beam=2) == models[1].generate(ids, beam=2)
    for model in models:
        with pytest.raises(UserError, match="n_best=2: generate returns the best alone; search returns several"):
            model.generate(ids, beam=2, n_best=2)
        with pytest.raises(UserError, match="expected text, or a list of lines, not int"):
            model.translate(3)
        with pytest.raises(UserError, match="line 1: must be text, not list"):
            model.stream(LINES)
        with pytest.raises(UserError, match="expected a list of lists of ids, found str"):
            model.generate("one")
        with pytest.raises(UserError, match="generate needs a decoder; architecture='encoder-decoder' is for transl"):
            model.complete("one")
        with pytest.raises(UserError, match="fill needs an encoder; architecture='encoder-decoder' is for translate"):
            model.fill("one")


def test_one_file(place):
    model = mt.open_model(mt.export_search(place / "run", place / "one.onnx"))
    folder = mt.open_model(place / "onnx")
    assert model.translate(LINES[0], beam=2) == folder.translate(LINES[0], beam=2)
    assert [t.text for t in model.n_best(LINES[0], beam=2, n_best=2)] == [
        t.text for t in folder.n_best(LINES[0], beam=2, n_best=2)
    ]
    with pytest.raises(UserError, match="n_best=2: generate returns the best alone"):
        model.generate([[5, 2]], beam=2, n_best=2)
    assert model.generate([[5, 2]], [[5]]) == folder.generate([[5, 2]], [[5]])
    with pytest.raises(UserError, match="takes ids, no vectors"):
        model.generate(inputs_embeds=[[[0.5] * 8]])
    with pytest.raises(UserError, match="which gives whole lines alone"):
        model.stream("one")
    with pytest.raises(UserError, match="no log-probabilities"):
        model.log_probabilities([[5, 2]], [[5, 2]])


def test_the_translator_of_earlier_documents(place):
    from mlx_transformer.generation.with_mlx import MlxTranslator  # type: ignore[import-not-found]

    model, tokenizer = mt.load(place / "run")
    translator = MlxTranslator(model, tokenizer)
    assert translator.translate(LINES, max_new_tokens=8) == model.translate(LINES, max_new_tokens=8)
    assert "".join(translator.stream(LINES[0], max_new_tokens=8)) == model.translate(LINES[0], max_new_tokens=8)
    with pytest.raises(UserError, match="has no tokenizer"):
        MlxTranslator(model, None)


def test_quantised_models_are_saved_as_they_are(place):
    from mlx_transformer.convert.quantize import quantize_checkpoint
    from mlx_transformer.core.checkpoint import open_checkpoint
    from mlx_transformer.core.quantization import Scheme

    quantize_checkpoint(place / "run", place / "integers", Scheme(32, 4))
    saved = mt.load(place / "integers")[0].save(place / "integers copied")
    stored = dict(open_checkpoint(place / "integers").stored())
    assert all((array == stored[name]).all() for name, array in open_checkpoint(saved).stored())


def test_what_is_saved_is_what_was_loaded(place):
    model, tokenizer = mt.load(place / "run")
    again, its = mt.load(model.save(place / "saved"))
    assert its.to_json() == tokenizer.to_json()
    weights = again.weights()
    assert all((weights[name] == array).all() for name, array in model.weights().items())
    fresh = mt.Transformer(model.config)
    assert fresh.tokenizer is None
    fresh.tokenizer = tokenizer
    assert mt.load(fresh.save(place / "fresh"))[1].to_json() == tokenizer.to_json()


def test_keys_of_a_recipe_are_found_by_name(place):
    with pytest.raises(UserError, match="train: unknown key 'stepz'; did you mean 'steps'"):
        mt.train(out=place / "none", stepz=3)
    texts = {"source": place / "train.en", "target": place / "train.de"}
    mt.train(out=place / "twice", **texts, **KEYS)
    with pytest.raises(UserError, match="resume"):
        mt.train(out=place / "twice", **texts, **KEYS)


@pytest.mark.parametrize("package", ["mlx_transformer", "export"])
def test_type_checkers_may_read_the_packages(package):
    assert (ROOT / package / "py.typed").is_file()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
