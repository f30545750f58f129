"""The verdict in the model cards of the folders that were compared, and what export hands on of a card."""

from __future__ import annotations

import time

import pytest
import yaml
from random_models import random_weights, write_model

from export.package import export_onnx
from export.validate import validate_command
from mlx_transformer.core.card import BEGIN, END, UNPROVEN, begin_card
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=30, d_model=16, heads=1, d_ff=16, encoder_layers=1, decoder_layers=0, architecture="encoder"
)


def proof(folder):
    return (folder / "README.md").read_text(encoding="utf-8").partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]


def check(*folders):
    return validate_command(*folders, runtimes=["onnxruntime"], threads=1)


def test_the_verdict_stands_in_both_cards_until_the_weights_change(tmp_path, capsys):
    checkpoint, onnx = write_model(CONFIG, tmp_path, 1)
    assert proof(checkpoint) == proof(onnx) == UNPROVEN
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert check(checkpoint, onnx) == 0
    assert proof(checkpoint) == proof(onnx)
    first, _, runtime = proof(onnx).splitlines()
    assert first.startswith("**Equal**, said `mlx-transformer validate` on ")
    assert first[len("**Equal**, said `mlx-transformer validate` on ") :][:10] >= today
    assert runtime.startswith("- onnxruntime, float32: ")
    assert "weights bit for bit" in runtime
    assert runtime.endswith("Budget: 4 (rms) and 8 (largest) times the error of float32 itself")
    assert check(checkpoint, onnx) == 0  # the cards are no damage

    save_checkpoint(checkpoint, CONFIG, random_weights(CONFIG, 2), force=True)
    assert proof(checkpoint) == UNPROVEN
    assert check(checkpoint, onnx) == 1
    assert proof(onnx).startswith("**Not equal**: `mlx-transformer validate` found a difference on ")

    mine = tmp_path / "mine"
    export_onnx(checkpoint, mine)
    (mine / "README.md").write_text("# Mine\n")
    assert check(checkpoint, mine) == 0
    assert (mine / "README.md").read_text() == "# Mine\n"
    assert "warning" not in capsys.readouterr().err


def test_a_card_that_cannot_be_written_is_told_and_the_verdict_stays(tmp_path, monkeypatch, capsys):
    checkpoint, onnx = write_model(CONFIG, tmp_path, 1)

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mlx_transformer.system.durable.os.replace", refused)
    assert check(checkpoint, onnx) == 0
    captured = capsys.readouterr()
    assert "README.md: could not be written" in captured.err
    assert captured.err.count("\n") == 1
    assert "validate: equal" in captured.out


@pytest.mark.parametrize(("precision", "scored"), [(["float32", "float16"], True), (["float16"], False)])
def test_an_export_has_license_and_languages_and_the_scores_of_the_same_weights(precision, scored, tmp_path):
    scores = [{"name": "x", "results": []}]
    text = begin_card(license="mit", language=["en"], **{"model-index": scores})
    folder = save_checkpoint(tmp_path / "model", CONFIG, random_weights(CONFIG, 1), texts={"README.md": text})
    out = export_onnx(folder, tmp_path / "onnx", precision=precision, accept_loss=True)
    card = (out / "README.md").read_text(encoding="utf-8")
    keys = yaml.safe_load(card.split("---\n")[1])
    assert (keys["license"], keys["language"], keys["library_name"]) == ("mit", ["en"], "onnx")
    assert (keys.get("model-index") == scores) is scored
    assert "| `onnx/model" in card
