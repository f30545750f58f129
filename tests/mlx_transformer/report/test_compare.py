"""Two models on the same lines, in turns and in processes of their own; page, JSON and what the command refuses."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from command_line import both_models, caller, refused
from small_models import alone, random_weights
from standalone_page import read
from waiting import PATIENCE

from export import OnnxTransformer, export_onnx, export_search
from mlx_transformer import load
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.generation.evaluate import score
from mlx_transformer.report import worker
from mlx_transformer.report.comparing import SHOWN, page
from mlx_transformer.report.result import Comparison, SentencePair, Side, sentence_of

made = pytest.fixture(scope="module")(both_models)
pytestmark = pytest.mark.usefixtures("processes")
call = pytest.fixture(caller)

LINES = ["one two", "", "three. four", "five six! seven", "two <b>&", "four four four one", "seven"]
REFERENCES = ["one two", "", "four.", "five", "two", "one", "six"]


OPENING = ["mlx_transformer.report.worker", "mlx_transformer.commands.app", "mlx_transformer.runtime.transformer"]
OPENING += ["mlx_transformer.generation.evaluate", "export.runtime.transformer", "export.targets.portable.runtime"]


@pytest.fixture(scope="module")
def processes():
    """Those of the models come from one that has imported what they need; in `test_worker.py` each begins anew."""
    with pytest.MonkeyPatch.context() as patch:
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        context.set_forkserver_preload(OPENING)
        patch.setattr(worker, "multiprocessing", SimpleNamespace(get_context=lambda _: context))
        yield


@pytest.fixture(scope="module")
def files(made):
    """Beside the models: text, and another model of the same tokenizer, its export with two precisions."""
    (made / "in").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    (made / "ref").write_text("".join(f"{line}\n" for line in REFERENCES), encoding="utf-8")
    opened = open_checkpoint(made / "model")
    weights = {name: array[::-1].copy() if array.ndim > 1 else array for name, array in opened.tensors()}
    tokenizer = (made / "model" / "tokenizer.json").read_text(encoding="utf-8")
    save_checkpoint(made / "other", opened.config, weights, tokenizer)
    export_onnx(made / "other", made / "two", precision=["float32", "float16"], accept_loss=True)
    return made


def test_two_runtimes_agree_and_are_scored(call, files, tmp_path):
    out, data = tmp_path / "page.html", tmp_path / "c.json"
    options = ["--source", files / "in", "--reference", files / "ref", "--out", out, "--json", data, "--batch", 2]
    status, said, _ = call("compare", files / "model", files / "onnx", *options, "--beam", 2)
    assert status == 0
    assert said.startswith("All 7 outputs are the same.")
    assert said.endswith(f"{out}: 0 of 7 lines differ\n")
    found = json.loads(data.read_text(encoding="utf-8"))
    expected = load(files / "model")[0].translate(LINES, beam=2)
    scores = score(expected, REFERENCES)
    for name in ("bleu", "chrf", "exact_match"):
        assert round(found["scores"][name]["a"], 2) == scores[name]
        assert (found["scores"][name]["difference"], found["scores"][name]["p"]) == (0, 1)
    assert found["scores"]["bleu"]["signature"] == scores["bleu_signature"]
    assert (found["lines"], found["batches"], found["differing"], found["agreement"]) == (7, 4, 0, 100)
    assert found["options"]["beam"] == 2
    a, b = found["a"], found["b"]
    assert a["file_bytes"] == (files / "model" / "model.safetensors").stat().st_size
    used = OnnxTransformer(files / "onnx").folder.files
    assert b["file_bytes"] == sum(file.stat().st_size for file in used) > a["file_bytes"]
    for side in (a, b):
        assert len(side["batch_seconds"]) == 4
        assert sum(side["batch_seconds"]) > 0
        assert side["tokens_per_second"] > 0
        assert 10e6 < side["peak_memory_bytes"] < 4e9
    assert ("peak_array_bytes" in a, "peak_array_bytes" in b) == (True, False)
    assert "MLX" in a["runs on"]
    assert "ONNX Runtime" in b["runs on"]
    text = out.read_text(encoding="utf-8")
    assert "All 7 outputs are the same." in read(text)
    assert "http" not in text


@pytest.mark.slow
def test_two_models_differ_on_the_page(call, files, tmp_path):
    out, data = tmp_path / "page.html", tmp_path / "c.json"
    options = ["--source", files / "in", "--reference", files / "ref", "--out", out, "--json", data, "--batch", 3]
    status, said, _ = call("compare", files / "model", files / "two", "--precision-b", "float32", *options)
    assert status == 0
    found = json.loads(data.read_text(encoding="utf-8"))
    outputs = [
        load(files / "model")[0].translate(LINES),
        OnnxTransformer(files / "two", precision="float32").translate(LINES),
    ]
    differ = [i for i, (a, b) in enumerate(zip(*outputs, strict=True), 1) if a != b]
    assert len(differ) >= 3
    assert sorted(each["line"] for each in found["sentences"]) == differ
    assert f"{len(differ)} of 7 lines differ" in said
    for each in found["sentences"]:
        assert (each["a"], each["b"]) == (outputs[0][each["line"] - 1], outputs[1][each["line"] - 1])
        assert (each["source"], each["reference"]) == (LINES[each["line"] - 1], REFERENCES[each["line"] - 1])
    sizes = [abs(each["score_b"] - each["score_a"]) for each in found["sentences"]]
    assert sizes == sorted(sizes, reverse=True)
    assert found["b"]["name"].endswith("two, float32")
    text = read(out.read_text(encoding="utf-8"))
    for line in differ:
        assert LINES[line - 1] in text
        assert outputs[0][line - 1] in text
    assert out.read_text(encoding="utf-8").count("<article") == len(differ)


def test_without_reference_each_says_how_likely_it_finds_both(call, files, tmp_path):
    data = tmp_path / "c.json"
    options = ["--source", files / "in", "--out", tmp_path / "page.html", "--json", data, "--max-new-tokens", 4]
    status, said, _ = call("compare", files / "onnx", files / "two", "--precision-b", "float32", *options)
    assert status == 0
    found = json.loads(data.read_text(encoding="utf-8"))
    assert "scores" not in found
    models = OnnxTransformer(files / "onnx"), OnnxTransformer(files / "two", precision="float32")
    outputs = [model.translate(LINES, max_new_tokens=4) for model in models]
    tokenizer = models[0].translator.tokenizer
    kept = [i for i, line in enumerate(LINES) if line.strip()]
    sources = tokenizer.encode_batch([LINES[i] for i in kept])

    def mean(model, texts):
        targets = tokenizer.encode_batch([texts[i] for i in kept])
        return sum(float(row.sum(dtype=float)) for row in model.log_probabilities(sources, targets)) / len(kept)

    for name, model, own, other in zip("ab", models, outputs, reversed(outputs), strict=True):
        assert found["log_p"][name]["lines"] == len(kept)
        # Batches are others, so sums are rounded otherwise: by the fourth decimal, which the JSON has, not.
        assert found["log_p"][name]["own"] == pytest.approx(mean(model, own), abs=2e-4)
        assert found["log_p"][name]["other"] == pytest.approx(mean(model, other), abs=2e-4)
        assert found["log_p"][name]["differing"] == found["differing"] > 0
    assert "log p of its own output" in said
    assert "log p by A" in read((tmp_path / "page.html").read_text(encoding="utf-8"))
    alike = [each["similarity"] for each in found["sentences"]]
    assert alike == sorted(alike)


@pytest.mark.slow
def test_without_mlx_and_the_same_folder_twice(files, tmp_path):
    script = tmp_path / "no_mlx.py"  # which the processes of the models begin with too
    script.write_text(
        "import sys\nsys.modules['mlx'] = sys.modules['mlx.core'] = None\nfrom export.__main__ import main\n"
        "if __name__ == '__main__':\n    raise SystemExit(main(sys.argv[1:]))\n"
    )
    two = str(files / "two")
    options = ["--precision-a", "float32", "--precision-b", "float16", "--source", str(files / "in"), "--out"]
    command = [sys.executable, str(script), "compare", two, two, *options, str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    text = read((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert f"A: {two}, float32 B: {two}, float16" in text
    assert "MLX's arrays" not in text
    blocked = tmp_path / "blocked" / "mlx"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'mlx'\", name='mlx')\n")
    checkpoint = [*command[:3], str(files / "model"), *command[4:5], *options[2:], str(tmp_path / "other.html")]
    paths = os.pathsep.join([str(blocked.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}  # for the processes, too, which open the model
    done = subprocess.run(checkpoint, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 2
    assert "needs MLX, which is not installed" in done.stderr


@pytest.mark.slow
def test_a_file_with_the_search_has_no_probabilities(call, files, tmp_path):
    export_search(files / "model", tmp_path / "search.onnx")
    data = tmp_path / "c.json"
    options = ["--source", files / "in", "--out", tmp_path / "page.html", "--json", data, "--max-new-tokens", 4]
    status, _, _ = call("compare", tmp_path / "search.onnx", files / "onnx", *options)
    assert status == 0
    found = json.loads(data.read_text(encoding="utf-8"))
    assert (found["agreement"], found["log_p"]["a"]) == (100, None)
    assert found["log_p"]["b"]["own"] == found["log_p"]["b"]["other"] < 0
    assert found["a"]["file_bytes"] == (tmp_path / "search.onnx").stat().st_size


def test_what_is_refused(call, files, tmp_path):
    (tmp_path / "long").write_text("one\n" + "one " * 60 + "\n")
    (tmp_path / "notes").write_text("mine")
    page = tmp_path / "page.html"
    models = [files / "model", files / "onnx"]
    given = ["--source", files / "in", "--out", page]
    refused(call("compare", "nowhere", files / "onnx", *given), "nowhere: no such folder")
    refused(call("compare", *models, "--source", tmp_path / "no"), "no: cannot be read")
    refused(call("compare", *models, *given, "--reference", tmp_path / "long"), "in has 7 lines", "long has 2")
    refused(call("compare", *models, *given, "--precision-a", "int8"), "int8 is for ONNX folders; a checkpoint")
    refused(call("compare", *models, *given, "--precision-b", "int8"), "holds float32, not int8")
    refused(call("compare", *models[:1] * 2, *given, "--threads", 2), "--threads is for ONNX Runtime")
    refused(call("compare", *models, *given, "--batch", 0), "--batch 0 must be at least 1")
    refused(call("compare", *models, *given, "--beam", 0), "--beam 0")
    refused(
        call("compare", *models, "--source", tmp_path / "long", "--out", page), "line 2", "at most 40", "--overlong"
    )
    refused(call("compare", *models, "--source", files / "in", "--out", files / "in"), "is read as well")
    refused(call("compare", *models, "--source", files / "in", "--out", tmp_path), "is a folder")
    refused(call("compare", *models, "--source", files / "in", "--out", tmp_path / "notes"), "notes: holds no page")
    refused(call("compare", *models, *given, "--json", tmp_path / "notes"), "notes: holds no comparison")
    refused(call("compare", *models, *given, "--json", page), "need two names")
    (tmp_path / "empty").write_text("")
    refused(call("compare", *models, "--source", tmp_path / "empty", "--out", page), "no lines")
    assert not page.exists()
    assert (tmp_path / "notes").read_text(encoding="utf-8") == "mine"


def test_long_lines_are_counted(call, files, tmp_path):
    (tmp_path / "long").write_text("one\n" + "one " * 60 + "\n")
    data = tmp_path / "c.json"
    options = ["--source", tmp_path / "long", "--out", tmp_path / "p.html", "--json", data, "--overlong", "truncate"]
    for force in ([], ["--force"]):  # which replaces what an earlier comparison wrote
        assert call("compare", files / "onnx", files / "onnx", *options, *force)[0] == 0
    found = json.loads(data.read_text(encoding="utf-8"))
    assert (found["a"]["overlong_lines"], found["b"]["overlong_lines"]) == (1, 1)
    assert "lines too long" in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_a_decoder_is_refused_by_name(call, files, tmp_path):
    config = dataclasses.replace(alone("paper", "decoder"), vocab_size=300, source_vocab_size=300)
    tokenizer = (files / "model" / "tokenizer.json").read_text(encoding="utf-8")
    save_checkpoint(tmp_path / "decoder", config, random_weights(config), tokenizer)
    options = ["--source", files / "in", "--out", tmp_path / "p.html"]
    said = call("compare", tmp_path / "decoder", files / "onnx", *options)
    refused(said, "decoder: translating needs an encoder-decoder", "is for generate")


def side(name: str, outputs: list[str]) -> Side:
    return Side(name, {"model": name}, 10, outputs, [1.0, 1.0], [5, 4], 1, None)


def test_a_page_of_many_and_strange_lines():
    count = SHOWN + 5
    texts = [f"<script>{i}" for i in range(count)]
    sentences = [SentencePair(i + 1, text, None, text, f"{text}&amp;", similarity=50.0) for i, text in enumerate(texts)]
    c = Comparison(side("<i>", texts), side("b", texts), count, 2, {"batch": 8, "beam": None}, sentences)
    text = page(c)
    said = read(text)
    assert f"{SHOWN:,} of {count:,} lines" in said
    assert text.count("<article") == SHOWN
    assert text.count("<script>") == 1
    assert "A: <i>" in said
    assert "<script>7&amp;" in said
    assert sentence_of(c).startswith(f"{count:,} of {count:,} outputs differ (100 %)")
    assert repr(c) == f"Comparison(<i>, b: {sentence_of(c)})"
    assert "&lt;i&gt;" in c._repr_html_()
    assert re.findall(r"<option value=\"(\w+)\"", text) == ["difference", "line"]
