"""ONNX files without our names: found by Hugging Face's or mapped, judged by their logits alone."""

import shutil
from pathlib import Path

import onnx
import pytest
from random_models import write_model
from rich.console import Console
from small_models import configs

from export.__main__ import main
from export.validate import compare, validate_command
from export.validate.report.html import page
from mlx_transformer.system.errors import UserError

CONFIGS = configs()


def foreign(exported: Path, folder: Path) -> Path:
    """Only the graphs and their data."""
    shutil.copytree(exported / "onnx", folder, ignore=lambda _, names: [n for n in names if "onnx" not in n])
    return folder


@pytest.mark.parametrize("name", ["paper", "modern", "paper, encoder"])
def test_files_without_our_names_are_judged_by_their_logits(name: str, tmp_path: Path) -> None:
    checkpoint, exported = write_model(CONFIGS[name], tmp_path, 1)
    other = foreign(exported, tmp_path / "other")
    report = compare(checkpoint, other, ["onnxruntime"], seed=1, threads=1)
    assert report.equal, report.failures()
    assert {(p.path, p.tap) for p in report.points} == {("plain", "logits")}
    assert report.weights == ()
    assert report.runtimes[0].details["compared"] == "logits of one full pass alone"
    console = Console(record=True, width=200)
    report.print(console)
    for text in (console.export_text(), page(report)):
        assert "onnxruntime: only logits of one full pass were compared" in text
        assert "there are no taps" in text
        assert "bit for bit" not in text.partition("The rule")[0]


def test_our_own_files_have_no_such_note(tmp_path: Path) -> None:
    checkpoint, exported = write_model(CONFIGS["paper"], tmp_path, 1)
    report = compare(checkpoint, exported, ["onnxruntime"], seed=1, threads=1, searches=False)
    assert report.equal
    assert report.notes == []
    assert "only logits" not in page(report)


def test_a_wrong_file_of_somebody_else_is_a_mismatch(tmp_path: Path) -> None:
    checkpoint, _ = write_model(CONFIGS["paper"], tmp_path / "one", 1)
    _, exported = write_model(CONFIGS["paper"], tmp_path / "two", 2)
    report = compare(
        checkpoint, foreign(exported, tmp_path / "other"), ["onnxruntime"], seed=1, threads=1, searches=False
    )
    assert report.verdict == "mismatch"
    assert "first over budget: logits (plain, " in report.failures()[0]


def test_names_are_mapped_and_unknown_ones_told(tmp_path: Path) -> None:
    checkpoint, exported = write_model(CONFIGS["paper, encoder"], tmp_path, 1)
    model = onnx.load(foreign(exported, tmp_path / "other") / "model.onnx")
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            node.input[k] = "src" if name == "input_ids" else name
    model.graph.input[0].name = "src"
    file = tmp_path / "theirs.onnx"
    onnx.save(model, file)
    assert compare(
        checkpoint, file, ["onnxruntime"], seed=1, threads=1, names={"input_ids": "src"}, searches=False
    ).equal
    with pytest.raises(UserError, match="has no input or output 'nothing'"):
        compare(checkpoint, file, ["onnxruntime"], names={"logits": "nothing"})
    with pytest.raises(UserError, match=r"input 'src' is not one of input_ids, .*attention_mask"):
        compare(checkpoint, file, ["onnxruntime"])
    options = dict(runtimes=["onnxruntime"], threads=1)
    assert validate_command(checkpoint, file, names="input_ids=src", **options) == 0
    assert validate_command(checkpoint, file, names="input_ids", **options) == 2
    command = ["validate", str(checkpoint), str(file), "--runtimes", "onnxruntime", "--threads", "1"]
    assert main([*command, "--names", "input_ids=src"]) == 0
    assert main(command) == 2
