"""The command line with a model: text through it, evaluation, export, folders described."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import onnx
import pytest
from combined import thinned
from command_line import LINES, PROGRESS, TEXT, both_models, caller, refused
from forked import Process
from head_models import head_model
from tiny_run import COMMAND, start
from waiting import PATIENCE
from word_pieces import write_encoder

from export import OnnxTransformer
from export.package.plan import describe_graphs
from mlx_transformer import load
from mlx_transformer.commands import quickstart
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.generation import line_files
from mlx_transformer.system.errors import UserError

GOLDEN = Path(__file__).parents[1] / "families" / "golden_decoders"
made = pytest.fixture(scope="module")(both_models)
call = pytest.fixture(caller)


def test_translate_line_by_line_from_standard_input(call, made):
    translator = load(made / "model")[0]
    expected = translator.translate(LINES)
    assert any(expected)
    status, out, said = call("translate", made / "model", stdin=TEXT)
    assert (status, said) == (0, "")
    assert out.split("\n")[:-1] == [line.replace("\n", " ") for line in expected]
    assert [bool(line) for line in out.split("\n")[:-1]][1::2] == [False, False]  # empty lines stay


def test_both_backends_print_the_same(call, made):
    options = ["--beam", 3, "--n-best", 2, "--length-penalty", 0.2, "--early-stopping", "--max-new-tokens", 8]
    mlx, onnx = (call("translate", made / name, *options, stdin=TEXT) for name in ("model", "onnx"))
    assert mlx == onnx
    assert [line.count("\t") for line in mlx[1].split("\n")[:-1]] == [1] * 5
    sampled = ["--sample", "--temperature", 0.7, "--top-k", 9, "--top-p", 0.9]
    first, again, other = (
        call("translate", made / "model", *sampled[:2], seed, *sampled[3:], stdin=TEXT) for seed in "334"
    )
    assert first == again
    assert first != other


def test_translate_files(call, made, tmp_path):
    (tmp_path / "in").write_bytes(TEXT.encode())
    status, out, said = call("translate", made / "model", "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert (status, out, said) == (0, "", "")
    assert (tmp_path / "out").read_text(encoding="utf-8") == call("translate", made / "model", stdin=TEXT)[1]
    refused(call("translate", made / "model", "--input", tmp_path / "no"), "no: cannot be read")
    refused(call("translate", made / "model", "--input", tmp_path), "cannot be read (Is a directory)")
    refused(call("translate", made / "model", "--output", tmp_path / "no" / "x"), "cannot be written")


def test_lines_that_are_too_long(call, made, tmp_path):
    long = "one " * 100
    refused(call("translate", made / "model", "--overlong", "error", stdin=f"x\n{long}\n"), "line 2: ", "at most 40")
    asked = [[], *(["--overlong", policy] for policy in ("split", "truncate", "skip"))]
    results = [call("translate", made / "model", *policy, stdin=f"{long}\nx\n") for policy in asked]
    assert results[0] == results[1]
    for status, out, said in results:
        assert (status, out.count("\n")) == (0, 2)
        assert said.startswith("standard input: 1 of 2 lines, the first of them line 1: longer than the model takes, ")
    assert results[3][1].startswith("\n")
    (tmp_path / "in").write_text(f"{long}\nx\n")
    files = ["--source", tmp_path / "in", "--reference", tmp_path / "in"]
    refused(call("evaluate", made / "onnx", *files), "line 1: ", "choose --overlong split")


def test_scores_and_json(call, made):
    arguments = ["--beam", 3, "--n-best", 2]
    plain = call("translate", made / "onnx", *arguments, stdin=TEXT)[1].split("\n")[:-1]
    scored = call("translate", made / "onnx", *arguments, "--scores", stdin=TEXT)[1].split("\n")[:-1]
    rows = [
        json.loads(line) for line in call("translate", made / "onnx", *arguments, "--json", stdin=TEXT)[1].splitlines()
    ]
    for line, cells, row, source in zip(plain, scored, rows, LINES, strict=True):
        cells = cells.split("\t")
        assert (cells[::2], len(cells)) == (line.split("\t"), 4)
        assert row["source"] == source
        assert [t["text"] for t in row["translations"]] == [text for text in cells[::2] if source.strip()] or [""]
        assert [f"{t['score']:.4f}" for t in row["translations"]] == [score for score in cells[1::2] if score]


@pytest.mark.parametrize("inside", thinned(["--embed-tokenizer", "--search"], 2))
def test_one_file_with_the_search(call, made, tmp_path, inside):
    if inside == "--embed-tokenizer":
        pytest.importorskip("onnxruntime_extensions", reason="pip install -e '.[text]'")
    file = tmp_path / "one.onnx"
    assert call("export", made / "model", file, inside)[0] == 0
    options = ["--beam", 3, "--max-new-tokens", 8]
    text = f"{TEXT}{'one ' * 100}\n"
    expected = call("translate", made / "onnx", *options, stdin=text)
    assert call("translate", file, *options, stdin=text) == expected
    (tmp_path / "in").write_text(TEXT, encoding="utf-8")
    files = ["--source", tmp_path / "in", "--reference", tmp_path / "in", *options]
    scores = [json.loads(call("evaluate", model, *files)[1]) | {"model": ""} for model in (made / "onnx", file)]
    assert scores[0] == scores[1]
    status, out, said = call("info", file)
    assert (status, said) == (0, "")
    for word in ("search in one ONNX file", "float32", "d_model", "scores", "opset"):
        assert word in out
    assert ("text by the tokenizer in it" in out) == (inside == "--search")
    refused(call("translate", file, "x", "--stream"), "leave out --stream")
    refused(call("translate", file, "x", "--backend", "mlx"), "MLX needs the checkpoint")
    refused(call("serve", file, "--precision", "int8"), "is of one precision; leave out --precision")
    (tmp_path / "bad.onnx").write_text("x")
    refused(call("translate", tmp_path / "bad.onnx", "x"), "bad.onnx: ONNX Runtime can't open it")
    refused(call("info", tmp_path / "bad.onnx"), "bad.onnx: cannot be read as an ONNX model")
    typeless = onnx.load(file)
    typeless.graph.input[0].type.tensor_type.elem_type = 99
    onnx.save(typeless, tmp_path / "bad.onnx")
    refused(call("info", tmp_path / "bad.onnx"), f"bad.onnx: {typeless.graph.input[0].name} is of type 99")
    emptied = onnx.load(file)
    tensor = next(tensor for tensor in emptied.graph.initializer if tensor.raw_data)
    tensor.raw_data = tensor.raw_data[:-1]
    onnx.save(emptied, tmp_path / "bad.onnx")
    for command in (["info"], ["validate", made / "model"]):
        status, _, said = call(*command, tmp_path / "bad.onnx")
        assert (status, said.count("\n")) == (2, 1)
        assert f"bad.onnx: the numbers of {tensor.name} don't fill its shape" in said


@pytest.mark.parametrize("columns", [50, 80])
def test_info_cuts_nothing_on_a_narrow_terminal(call, made, monkeypatch, columns):
    """Names that differ in their ends alone, such as those of keys and values."""
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, _ = call("info", made / "onnx")
    assert (status, "\u2026" in out) == (0, False)
    assert max(map(len, out.splitlines())) <= columns


def test_what_has_no_tokenizer_or_is_no_file_is_named(call, made, tmp_path):
    opened = open_checkpoint(made / "model")
    save_checkpoint(tmp_path / "plain", opened.config, dict(opened.tensors()))
    refused(call("translate", tmp_path / "plain", "x"), f"{tmp_path / 'plain'}: has no tokenizer.json")
    os.mkfifo(tmp_path / "pipe.onnx")
    for command in (["translate"], ["info"], ["serve", "--port", 0], ["export", tmp_path / "out"]):
        refused(call(command[0], tmp_path / "pipe.onnx", *command[1:]), "neither a folder nor a regular file")


def test_text_as_an_argument(call, made):
    expected = call("translate", made / "onnx", stdin="one two\nthree\n")[1]
    assert call("translate", made / "onnx", "one two", "three") == (0, expected, "")
    refused(call("translate", made / "onnx", "one", "--input", made / "onnx"), "text is given twice")
    refused(call("translate", made / "onnx", "one", "--resume"), "--resume continues a file: it needs")


# As soon as some of it is safe.
KILLED = """
import os, signal
from mlx_transformer.generation.output import Partial
save = Partial.save
def killed(target, progress):
    save(target, progress)
    os.kill(os.getpid(), signal.SIGKILL)
Partial.save = killed
"""


def test_a_killed_translation_is_continued(made, tmp_path):
    source = tmp_path / "in"
    source.write_text("one two three\nfour five\n" * 2500)
    options = ["--input", source, "--max-new-tokens", 2, "--threads", 1]
    with start("translate", made / "onnx", *options, "--output", tmp_path / "whole") as process:
        assert process.wait(timeout=PATIENCE) == 0
    arguments = ["translate", made / "onnx", *options, "--output", tmp_path / "out"]
    with start(*arguments, command=[sys.executable, "-c", KILLED + COMMAND[2]]) as process:
        assert process.wait(timeout=PATIENCE) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    with start(*arguments) as process:
        assert process.wait(timeout=PATIENCE) == 2
        assert "go on with --resume" in process.stderr.read()
    with start(*arguments, "--resume", "--beam", 2) as process:
        assert process.wait(timeout=PATIENCE) == 2
        assert "--beam 1 before, now 2" in process.stderr.read()
    with start(*arguments, "--resume") as process:
        assert process.wait(timeout=PATIENCE) == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "whole"}


def test_bytes_that_are_no_text_are_replaced_with_a_warning(call, made):
    status, out, said = call("translate", made / "model", stdin=b"one \xff\ntwo\n")
    assert (status, out.count("\n")) == (0, 2)
    assert said.strip() == "standard input, line 1: not UTF-8, bad bytes are replaced"


def test_evaluate_prints_json_alone(call, made, tmp_path):
    (tmp_path / "source").write_text(TEXT, encoding="utf-8")
    perfect = call("translate", made / "model", stdin=TEXT)[1]
    (tmp_path / "reference").write_text(perfect, encoding="utf-8")
    files = ["--source", tmp_path / "source", "--reference", tmp_path / "reference"]
    results = {}
    for name in ("model", "onnx"):
        status, out, said = call("evaluate", made / name, *files)
        assert (status, said) == (0, "")
        results[name] = json.loads(out)
        assert results[name].pop("model") == str(made / name)
    assert results["model"] == results["onnx"]
    assert results["model"]["exact_match"] == 100
    assert results["model"]["lines"] == 5
    assert "tok:13a" in results["model"]["bleu_signature"]
    assert results["model"]["chrf"] > 99
    assert json.loads(call("evaluate", made / "model", *files, "--beam", 4, "--max-new-tokens", 1)[1])["beam"] == 4


def test_evaluate_keeps_the_translations(call, made, tmp_path):
    (tmp_path / "source").write_text(TEXT, encoding="utf-8")
    files = ["--source", tmp_path / "source", "--reference", tmp_path / "source"]
    assert call("evaluate", made / "onnx", *files, "--output", tmp_path / "kept")[0] == 0
    assert (tmp_path / "kept").read_text(encoding="utf-8") == call("translate", made / "onnx", stdin=TEXT)[1]
    refused(call("evaluate", made / "onnx", *files, "--output", tmp_path / "source"), "is read as well")
    (tmp_path / "source").write_text("one " * 100 + "\ntwo\n")
    found = json.loads(call("evaluate", made / "onnx", *files, "--overlong", "split")[1])
    assert found["overlong"] == {"lines": 1, "treated_by": "split"}


def test_score(call, made, tmp_path, monkeypatch):
    (tmp_path / "source").write_text(TEXT, encoding="utf-8")
    (tmp_path / "target").write_text("".join(reversed(TEXT.splitlines(True))), encoding="utf-8")
    files = ["--source", tmp_path / "source", "--reference", tmp_path / "target"]
    found = {}
    for name in ("model", "onnx"):
        status, out, said = call("score", made / name, *files)
        assert (status, said) == (0, "")
        found[name] = [[float(cell) for cell in line.replace("\t", " ").split()] for line in out.splitlines()]
        rows = [json.loads(line) for line in call("score", made / name, *files, "--json")[1].splitlines()]
        assert [row["source"] for row in rows] == LINES
        assert [row["target"] for row in rows] == LINES[::-1]
        for row, (total, *parts) in zip(rows, found[name], strict=True):
            assert row["tokens"][-1] == "</s>"
            assert len(row["tokens"]) == len(parts)
            assert row["log_p"] == pytest.approx(sum(row["token_log_p"]))
            assert parts == [round(value, 4) for value in row["token_log_p"]]
            assert total == pytest.approx(sum(parts), abs=1e-3)
            assert total < 0
    for one, other in zip(found["model"], found["onnx"], strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    assert call("score", made / "onnx", *files, "--output", tmp_path / "out")[:2] == (0, "")
    assert (tmp_path / "out").read_text(encoding="utf-8") == call("score", made / "onnx", *files)[1]
    (tmp_path / "target").write_text(f"x\n{'one ' * 100}\nx\nx\nx\n")
    refused(call("score", made / "onnx", "--reference", tmp_path / "out"), "what it translates: give --source")
    refused(call("score", made / "onnx", *files), "line 2: ", "choose --overlong skip")
    status, out, said = call("score", made / "onnx", *files, "--overlong", "skip")
    assert (status, out.split("\n")[1]) == (0, "\t")
    assert said.endswith("1 of 5 pairs, the first of them line 2: longer than the model takes, left empty\n")
    monkeypatch.setattr(line_files, "PART_LINES", 2)
    assert call("score", made / "onnx", *files, "--overlong", "skip") == (0, out, said)
    refused(call("score", made / "onnx", *files, "--output", tmp_path / "new"), "line 2: ")
    assert not (tmp_path / "new").exists()


def test_export_writes_what_it_says(call, made, tmp_path):
    status, out, said = call("export", made / "model", tmp_path / "out")
    assert (status, said) == (0, "")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert out.startswith(f"{tmp_path / 'out'}: {len(files)} files, ")
    assert OnnxTransformer(tmp_path / "out").translate(["one"]) == load(made / "model")[0].translate(["one"])


def test_info_of_every_kind_of_folder(call, made):
    status, out, said = call("info", made / "model")
    assert (status, said) == (0, "")
    for text in ("checkpoint", "verified", "d_model", "16", "model.safetensors", "parameters"):
        assert text in out
    status, out, said = call("info", made / "onnx")
    assert (status, said) == (0, "")
    for text in (
        "ONNX models",
        "verified",
        "encoder_model.onnx",
        "opset",
        "input_ids",
        "int64",
        "batch_size",
        "d_model",
    ):
        assert text in out


def test_info_as_json(call, made, tmp_path):
    """Whatever the tables show: of a checkpoint, its package, an encoder with a head, a folder of transformers."""
    found = {name: json.loads(call("info", made / name, "--json")[1]) for name in ("model", "onnx")}
    assert found["model"]["config"] == open_checkpoint(made / "model").config.to_dict() == found["onnx"]["config"]
    assert found["model"]["stored_as"] == f"float32 {found['model']['tensors']} tensors"
    assert found["model"]["files"]["model.safetensors"] == (made / "model" / "model.safetensors").stat().st_size
    assert found["onnx"]["precisions"] == "float32"
    assert "encoder_model.onnx" in str(found["onnx"]["graphs"])
    encoder, published = write_encoder(tmp_path), GOLDEN / "qwen3"
    classes = head_model("bert-classes", tmp_path / "classes")
    facts = [json.loads(call("info", folder, "--json")[1]) for folder in (encoder, classes, published)]
    assert facts[0]["vectors"].startswith("dense: mean, ")
    assert facts[0]["prompt_query"] == "'q: '"
    assert facts[1]["labels"] == ", ".join(open_checkpoint(classes).config.head.labels)
    assert (facts[2]["config"]["query_key_norm"], facts[2]["stored_as"]) == (True, "float32 25 tensors")


def test_graph_facts(made, tmp_path):
    facts = describe_graphs(made / "onnx")
    assert list(facts) == sorted(f"onnx/{path.name}" for path in (made / "onnx" / "onnx").glob("*.onnx"))
    encoder = facts["onnx/encoder_model.onnx"]
    assert encoder["nodes"] > 20
    assert 18 <= encoder["opset"] <= 20
    assert [value[:2] for value in encoder["inputs"]] == [("input_ids", "int64"), ("attention_mask", "int64")]
    assert encoder["outputs"][0][0] == "last_hidden_state"
    assert encoder["outputs"][0][2].endswith(" x 16")
    merged, part = facts["onnx/decoder_model_merged.onnx"], facts["onnx/decoder_with_past_model.onnx"]
    assert merged["nodes"] > part["nodes"]  # both branches are counted
    for path in (made / "onnx" / "onnx").glob("*.onnx"):  # without the weights
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert list(describe_graphs(tmp_path).values()) == list(facts.values())
    (tmp_path / "broken.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(UserError, match=r"broken\.onnx: cannot be read as an ONNX model"):
        describe_graphs(tmp_path)


def test_a_reader_that_goes_away_is_no_error(made, tmp_path):
    (tmp_path / "in").write_text("one two three\n" * 6000, encoding="utf-8")
    with start("translate", made / "model", "--input", tmp_path / "in", "--max-new-tokens", 2) as process:
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # a page: less than the lines, however long the reader is away
            fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        assert os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.wait(timeout=PATIENCE) == 141
        assert PROGRESS.sub("", process.stderr.read()) == ""
    with start("info", made / "model", kind=Process, stdout=(closed := closed_pipe())) as process:
        os.close(closed)
        assert process.wait(timeout=PATIENCE) == 141
        assert process.stderr.read() == ""


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_commands_that_are_advised_can_be_typed(call, made, tmp_path):
    """In a folder with a space in its name too."""
    place = tmp_path / "my models"
    place.mkdir()
    (place / "model").symlink_to(made / "model")
    refused(call("translate", place / "model", "x", "--runtime", "onnx"), f"export '{place / 'model'}' OUT")
    with pytest.raises(UserError, match=rf"export '{place / 'model'}' OUT$"):
        OnnxTransformer(place / "model")
    (place / "wide").write_text("one", encoding="utf-16")
    refused(call("translate", made / "model", "-i", place / "wide"), f"UTF-8 '{place / 'wide'}' > NEW")
    *pages, last = quickstart.what_next({"report": f"{place}/report", "onnx": f"{place}/onnx"})
    assert [shlex.split(line, comments=True)[1:] for line in pages] == [
        [f"{place}/report/{page}"] for page in quickstart.PAGES
    ]
    assert shlex.split(last, comments=True)[1:] == ["translate", f"{place}/onnx", "May 3, 2024"]
