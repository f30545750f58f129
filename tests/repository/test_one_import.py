"""What people do with a model takes one import and at most three lines; README and pages show the same names."""

import inspect
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest
import ten_tasks
from imports import ROOT
from small_models import write_text_model
from ten_tasks import TASKS
from waiting import PATIENCE, port_of

import mlx_transformer as mt
from mlx_transformer.system.errors import UserError

IMPORT = "import mlx_transformer as mt"
LINES = ["one two", "three. four"]
KEYS = {"preset": "tiny", "steps": 2, "vocab_size": 280}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """run: a checkpoint, onnx: its export; and parallel text."""
    folder = write_text_model(tmp_path_factory.mktemp("tasks"))
    (folder / "model").rename(folder / "run")
    for name in ("train.en", "train.de"):
        (folder / name).write_text("one two three\nfour five\n" * 100)
    return folder


def test_each_task_takes_one_import_and_at_most_three_lines():
    text = Path(ten_tasks.__file__).read_text(encoding="utf-8")
    assert len({task.__name__ for task in TASKS}) == 10
    assert [line for line in text.splitlines() if line.startswith(("import", "from"))] == [IMPORT]
    for task in TASKS:
        lines = inspect.getsource(task).splitlines()[1:]
        assert len([IMPORT, *lines]) <= 3, task.__name__
        assert not any("import" in line for line in lines), task.__name__


IN_A_PROCESS = (ten_tasks.compare, ten_tasks.serve)


@pytest.mark.fast("n_best", "translate", "load", "export", "stream", "save")
@pytest.mark.parametrize("task", [task for task in TASKS if task not in IN_A_PROCESS], ids=lambda task: task.__name__)
def test_a_task(task, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    task()
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_type_checkers_see_no_any_in_a_users_file(tmp_path):
    """mypy, whose option finds every expression of type Any; pyright reads the file, strictly, in `make lint`."""
    pytest.importorskip("mypy")
    users = tmp_path / "users.py"
    more = 'model = mt.load("run")[0]\n'
    more += 'print(model.embed("x", kind="sparse").get(3), model.embed(["x"], kind="sparse")[0].get(3))\n'
    users.write_text(Path(ten_tasks.__file__).read_text(encoding="utf-8") + more, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--disallow-any-expr", "--follow-imports=silent"]
    wrong = tmp_path / "wrong.py"  # read in the same process, which takes seconds for the libraries
    wrong.write_text("import mlx_transformer as mt\n\nprint(mt.load('run')[0].token_logits([[1]]))\n")
    arguments = [*command, "--cache-dir", str(tmp_path / "cache"), "--no-error-summary", str(users), str(wrong)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert 'Expression has type "Any"' in done.stdout, done.stderr
    assert {line.partition(":")[0] for line in said} == {"wrong.py"}, done.stdout


@pytest.mark.slow
def test_comparing_in_a_plain_script(place):
    """It starts processes, which must not run the script again."""
    script = place / "script.py"
    script.write_text(f"{IMPORT}\n{inspect.getsource(ten_tasks.compare)}\nprint('once')\ncompare()\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"once\n2 [0-2]\n", done.stdout)


def test_serving(place):
    code = f"{IMPORT}\n{inspect.getsource(ten_tasks.serve)}\nserve()".replace("port=8000", "port=0")
    server = subprocess.Popen([sys.executable, "-c", code], cwd=place, stderr=subprocess.PIPE, text=True)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port_of(server)}/health", timeout=PATIENCE) as answer:
            assert answer.status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.communicate()


def test_both_runtimes_have_the_same_verbs(place):
    models = [mt.open_model(place / "run"), mt.open_model(place / "onnx")]
    one, several = ([model.translate(text, max_new_tokens=8) for model in models] for text in (LINES[0], LINES))
    assert one == [several[0][0]] * 2
    assert several[0] == several[1]
    assert "".join(models[0].stream(LINES[0], max_new_tokens=8)) == one[0]
    ids = models[0].tokenizer.encode_batch(LINES)
    assert models[0].generate(ids, beam=2) == models[1].generate(ids, beam=2)
    for model in models:
        with pytest.raises(UserError, match="n_best=2: generate returns only the best output; search returns several"):
            model.generate(ids, beam=2, n_best=2)
        with pytest.raises(UserError, match="expected text, or a list of lines, not int"):
            model.translate(3)
        with pytest.raises(UserError, match="line 1: must be text, not list"):
            model.stream(LINES)
        assert model.generate(LINES[0], max_new_tokens=8) == one[0]
        with pytest.raises(UserError, match="generate needs a decoder; architecture='encoder-decoder' is for transl"):
            model.complete("one")
        with pytest.raises(UserError, match="fill needs an encoder; architecture='encoder-decoder' is for translate"):
            model.fill("one")


def test_load_takes_every_form(place):
    file = mt.export_search(place / "run", place / "loaded.onnx")
    kinds = {"run": mt.Transformer, "onnx": mt.OnnxTransformer, file.name: mt.SearchModel}
    models = []
    for name, kind in kinds.items():
        model, tokenizer = mt.load(place / name)
        assert isinstance(model, kind)
        assert tokenizer is model.tokenizer
        models.append(model)
    assert len({model.translate(LINES[0], max_new_tokens=8) for model in models}) == 1
    assert repr(models[1]).startswith(f"OnnxTransformer({str(place / 'onnx')!r}): encoder-decoder, ")
    assert repr(models[2]).startswith(f"SearchModel({str(file)!r}): encoder-decoder, ")
    for model in models:
        with pytest.raises(UserError, match=r"there is no option 'num_beams' \(did you mean 'beam'\?\)"):
            model.translate("one", num_beams=2)
    with pytest.raises(UserError, match=r"no option 'beams' \(did you mean 'beam'\?\)"):
        models[1].stream("one", beams=2)
    with pytest.raises(UserError, match="no name on the Hub, which alone has revisions"):
        mt.load(place / "run", revision="main")


def test_scores_of_texts(place):
    models = [mt.open_model(place / "run"), mt.open_model(place / "onnx")]
    best = [model.n_best(LINES[0], beam=2, length_penalty=0.0, max_new_tokens=40)[0] for model in models]
    for model, one in zip(models, best, strict=True):
        [row] = model.tokenizer.source.encode_batch([LINES[0]])
        [wanted] = model.tokenizer.encode_batch([one.text])
        [tokens] = model.log_probabilities([row], [wanted])
        assert model.score(LINES[0], one.text) == float(sum(map(float, tokens)))
        together = model.score(LINES, ["x", one.text])[0]  # more rows are added up in another order
        assert together == pytest.approx(model.score(LINES[0], "x"), rel=1e-6)
        with pytest.raises(UserError, match="2 lines but 1 translations"):
            model.score(LINES, "x")
        with pytest.raises(UserError, match="line 1: must be text, not int"):
            model.score(LINES[0], [3])


def test_an_onnx_folder_is_saved_as_it_is(place):
    for force in (False, True):  # the second time in the place of the first
        saved = mt.OnnxTransformer(place / "onnx").save(place / "again", force)
    files = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in (saved, place / "onnx")]
    assert files[0] == files[1]
    mt.OnnxTransformer(saved)
    with pytest.raises(UserError, match="is the folder that is read"):
        mt.OnnxTransformer(place / "onnx").save(place / "onnx")
    with pytest.raises(UserError, match="holds files that are no ONNX folder"):
        mt.OnnxTransformer(place / "onnx").save(place / "run")


def test_one_file(place):
    model = mt.open_model(mt.export_search(place / "run", place / "one.onnx"))
    folder = mt.open_model(place / "onnx")
    assert model.translate(LINES[0], beam=2) == folder.translate(LINES[0], beam=2)
    assert [t.text for t in model.n_best(LINES[0], beam=2, n_best=2)] == [
        t.text for t in folder.n_best(LINES[0], beam=2, n_best=2)
    ]
    with pytest.raises(UserError, match="n_best=2: generate returns only the best output"):
        model.generate([[5, 2]], beam=2, n_best=2)
    assert model.generate([[5, 2]], [[5]]) == folder.generate([[5, 2]], [[5]])
    with pytest.raises(UserError, match="takes ids, no vectors"):
        model.generate(inputs_embeds=[[[0.5] * 8]])
    with pytest.raises(UserError, match="gives only whole lines: leave out stream=True"):
        model.stream("one")
    with pytest.raises(UserError, match="no log-probabilities"):
        model.log_probabilities([[5, 2]], [[5, 2]])


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
