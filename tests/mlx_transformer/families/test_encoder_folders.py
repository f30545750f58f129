"""What published encoders' folders may say otherwise: classes counted, other heads beside, an end that is padding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from word_pieces import write_encoder

from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_object

GOLDEN = Path(__file__).parent / "golden_encoders"


def told_otherwise(folder: Path, name: str, tensors: Any = None, **values: Any) -> tuple[Path, list[str]]:
    """The checkpoint of a golden folder whose config.json says something else, and which holds more; and the notes."""
    shutil.copytree(GOLDEN / name, folder / "theirs")
    told = {**read_object(folder / "theirs" / "config.json"), **values}
    left = {key: value for key, value in told.items() if value is not None}
    (folder / "theirs" / "config.json").write_text(json.dumps(left), encoding="utf-8")
    weights = load_file(folder / "theirs" / "model.safetensors") | (tensors or {})
    save_file(weights, folder / "theirs" / "model.safetensors")
    notes = import_huggingface(folder / "theirs", folder / "ours")
    return folder / "ours", notes[1:]


def test_classes_may_be_counted_in_place_of_named(tmp_path: Path) -> None:
    ours, _ = told_otherwise(tmp_path, "bert-classes", id2label=None, label2id=None, num_labels=3)
    assert open_checkpoint(ours).config.head.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("count", [0, -1, 10**9, "3", True])
def test_numbers_of_classes_that_there_cannot_be(count: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"num_labels={count!r} must be a whole number from 1 to"):
        told_otherwise(tmp_path, "bert-classes", id2label=None, label2id=None, num_labels=count)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("bert", "cls.predictions.transform.LayerNorm.gamma"),
        ("bert-words", "classifier.weight"),
        ("roberta", "lm_head.bias"),
        ("distilbert", "vocab_transform.weight"),
        ("modernbert", "decoder.bias"),
    ],
)
def test_what_another_head_has_is_left_behind_and_told(name: str, other: str, tmp_path: Path) -> None:
    ours, notes = told_otherwise(tmp_path, name, {other: np.ones(4, np.float32)})
    assert notes == [f"not imported, as config.json names no such head: {other}"]
    import_huggingface(GOLDEN / name, tmp_path / "without")
    before, after = (dict(open_checkpoint(folder).tensors()) for folder in (tmp_path / "without", ours))
    assert all(np.array_equal(before[key], after[key]) for key in before.keys() | after.keys())


def test_another_name_of_an_activation(tmp_path: Path) -> None:
    ours, _ = told_otherwise(tmp_path, "bert", hidden_act="gelu_fast")
    assert open_checkpoint(ours).config.activation == "gelu_tanh"


def test_an_end_that_is_paddings_is_no_end(tmp_path: Path) -> None:
    """Where there is no text, no id of it counts but padding's."""
    ours, _ = told_otherwise(tmp_path, "roberta-words", eos_token_id=3)
    config = open_checkpoint(ours).config
    assert (config.pad_id, config.eos_id) == (3, 0)


def test_an_encoder_in_a_folder_within_is_opened_as_it_is(tmp_path: Path) -> None:
    """As older folders of sentence-transformers have it."""
    theirs = to_huggingface(write_encoder(tmp_path), tmp_path / "theirs")
    expected = Transformer.load(theirs).embed(["one", "two"])
    (theirs / "0_Transformer").mkdir()
    for file in [path for path in theirs.iterdir() if path.is_file() and path.name != "modules.json"]:
        file.rename(theirs / "0_Transformer" / file.name)
    parts = json.loads((theirs / "modules.json").read_text(encoding="utf-8"))
    parts[0]["path"] = "0_Transformer"
    (theirs / "modules.json").write_text(json.dumps(parts), encoding="utf-8")
    np.testing.assert_array_equal(Transformer.load(theirs).embed(["one", "two"]), expected)
    with pytest.raises(UserError, match="is a published model, and here a checkpoint is needed"):
        open_checkpoint(theirs)
