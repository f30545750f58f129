"""Adapters that PEFT saved, and what it computed with them (`make_golden_peft.py`): imported they compute the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import mlx_transformer as mt
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.system.errors import UserError

HERE = Path(__file__).parent
GOLDEN = HERE / "golden_peft"
NOTES = {
    "lora": "LoRA of rank 2 of 11 matrices",
    "rslora": "rsLoRA of rank 2 of",
    "dora": "DoRA of rank 2, 3 of",
    "classes": "LoRA of rank 2 of 4 matrices, and 2 tensors of its own (classifier.bias, classifier.weight)",
    "embedding": "LoRA of rank 2 of 3 matrices",
}


@pytest.mark.parametrize("name", NOTES)
def test_an_imported_adapter_computes_what_peft_computes(name: str, tmp_path: Path) -> None:
    [note] = [note for note in import_huggingface(GOLDEN / name, tmp_path / "model") if "merged into" in note]
    assert NOTES[name] in note
    opened, given = open_checkpoint(tmp_path / "model"), dict(np.load(GOLDEN / name / "answers.npz"))
    weights, mask = dict(opened.tensors()), given["mask"].astype(bool)
    others = {"token_types": np.zeros_like(given["ids"])} if opened.config.token_types else {}
    truths = []
    for kind in (np.float64, np.float32):
        reference = Reference(opened.config, weights, kind)
        if "target" in given:
            truths.append(reference(given["ids"], given["target"], mask))
        elif name == "embedding":  # of a bare encoder
            truths.append(reference.encode(given["ids"], mask, **others))
        else:
            truths.append(reference(given["ids"], mask=mask, **others))
    valid = np.ones(given["target"].shape if "target" in given else len(mask), bool)
    valid = mask if given["logits"].shape[:2] == mask.shape and "target" not in given else valid
    truth = Truth.of(*truths, valid)
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    measured = Measurement.of(Deviation.of(given["logits"], truth), truth.scale, pool, budget)
    assert measured.passed, measured


def test_labels_are_those_of_transformers_and_load_takes_the_folder(tmp_path: Path) -> None:
    model, _ = mt.load(GOLDEN / "classes")
    assert model.config.head.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """golden_peft/lora, with its base beside it."""
    for part in ("golden/t5", "golden_peft/lora"):
        shutil.copytree(HERE / part, tmp_path / part)
    return tmp_path / "golden_peft" / "lora"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3': LORA can be read"),
        ({"peft_type": None}, "peft_type None"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changed the base too"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
        ({"alpha_pattern": [1]}, "alpha_pattern an object of numbers"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path names no base"),
        ({"base_model_name_or_path": "../../golden/none"}, "golden/none: no such folder"),
    ],
)
def test_settings_that_cannot_be_read(changes: dict, message: str, copied: Path) -> None:
    file = copied / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        import_huggingface(copied, copied.parent / "model")


def test_an_adapter_of_another_base_is_refused(copied: Path) -> None:
    file = copied / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(HERE / "golden/marian")}))
    with pytest.raises(UserError, match=r"doesn't fit its base .*: .*the base has no decoder\.block\.0"):
        import_huggingface(copied, copied.parent / "model")
