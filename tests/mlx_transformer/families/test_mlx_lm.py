"""Folders that mlx-lm wrote, and what it computed with them (`make_golden_mlx_lm.py`): the same integers and logits
here, and the same files again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from export import export_onnx
from export.validate import compare
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer import Transformer
from mlx_transformer.cli import main
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import Checkpoint, open_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.families.table import FAMILIES

GOLDEN = Path(__file__).parent / "golden_mlx_lm"
MODELS = [path.name for path in sorted(GOLDEN.iterdir()) if (path / "config.json").is_file()]
MODELS = [
    name for name in MODELS if json.loads((GOLDEN / name / "config.json").read_text("utf-8"))["model_type"] in FAMILIES
]


def assert_answers(opened: Checkpoint, folder: Path, got: np.ndarray | None = None) -> None:
    """mlx-lm's logits (or `got`) are those of the checkpoint's weights in float64, within float32's noise."""
    answers, weights = dict(np.load(folder / "answers.npz")), dict(opened.tensors())
    exact, single = (Reference(opened.config, weights, kind)(answers["ids"]) for kind in (np.float64, np.float32))
    truth = Truth.of(exact, single, np.ones(answers["ids"].shape, bool))
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    deviation = Deviation.of(answers["logits"] if got is None else got, truth)
    measured = Measurement.of(deviation, truth.scale, pool, budget)
    assert measured.passed, measured


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_and_the_same_files_again(name, tmp_path):
    notes = import_huggingface(GOLDEN / name, tmp_path / "model")
    opened = open_checkpoint(tmp_path / "model")
    stored, ids = load_file(GOLDEN / name / "model.safetensors"), np.load(GOLDEN / name / "answers.npz")["ids"]
    integers = [array for array in stored.values() if array.dtype == np.uint32]
    assert len(opened.quantization) >= len(integers) > 0 or name == "llama"
    assert any("bits" in note for note in notes) == bool(integers)
    assert_answers(opened, GOLDEN / name)
    for folder in (GOLDEN / name, tmp_path / "model"):
        assert_answers(opened, GOLDEN / name, np.array(Transformer.load(folder)(ids)))
    main(["to-huggingface", str(tmp_path / "model"), str(tmp_path / "theirs"), "--mlx-lm"])
    again = load_file(tmp_path / "theirs" / "model.safetensors")
    if name == "gpt2-5":  # positions are only added, and floats here
        packed = Scheme(32, 5).packed("model.wpe.weight", stored)
        stored = {key: array for key, array in stored.items() if ".wpe." not in key}
        stored |= {"model.wpe.weight": packed.dequantised()}
    for key in stored.keys() | again.keys():
        np.testing.assert_array_equal(again[key], stored[key], err_msg=key)
    ours, theirs = (json.loads((f / "config.json").read_text("utf-8")) for f in (tmp_path / "theirs", GOLDEN / name))
    assert [*ours] == sorted(ours)
    assert ours.get("quantization_config") == ours.get("quantization")
    assert named(ours, stored) == named(theirs, stored)
    with safe_open(tmp_path / "theirs" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "mlx"}
    indices = [
        json.loads((f / "model.safetensors.index.json").read_text()) for f in (tmp_path / "theirs", GOLDEN / name)
    ]
    assert indices[0]["weight_map"] == dict.fromkeys(sorted(stored), "model.safetensors")
    assert indices[0]["metadata"].keys() == indices[1]["metadata"].keys()
    assert indices[0]["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())


def named(config: dict, stored: dict) -> dict[str, dict]:
    """{path of a quantised matrix: its scheme}, whichever of them the entry has as its default."""
    values = dict(config.get("quantization", {}))
    usual = {key: values.pop(key) for key in ("group_size", "bits", "mode") if key in values}
    paths = [name.removesuffix(".scales") for name in stored if name.endswith(".scales")]
    return {path: {"mode": "affine", **values.get(path, usual)} for path in paths}


def test_exported_and_proven(tmp_path):
    """2, 6 and 8 bits, integers and short floats side by side."""
    import_huggingface(GOLDEN / "llama-mixed", tmp_path / "model")
    export_onnx(tmp_path / "model", tmp_path / "onnx", precision=["float32", "packed"])
    report = compare(tmp_path / "model", tmp_path / "onnx", seed=3, longest=12)
    assert report.equal, report
