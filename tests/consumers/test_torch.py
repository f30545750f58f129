"""`validate` judges what torch's own exporter makes of a checkpoint: equal where it is right, a mismatch where not."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
from cases import HERE, PYTHON
from small_models import encoder_decoder, random_weights

from export.__main__ import main
from mlx_transformer.core.checkpoint import save_checkpoint

pytestmark = pytest.mark.consumers

NAMES = "input_ids=src,decoder_input_ids=tgt,attention_mask=src_is_token,logits=scores"
LAYOUTS = {"one": ("one/model.onnx", ["--names", NAMES]), "two": ("two", [])}  # of files: path, options
PAPER = encoder_decoder("paper")
CONFIGS = {
    "post-norm": PAPER,
    "pre-norm": dataclasses.replace(
        PAPER, norm_placement="pre", attention_bias=True, output_bias=True, activation="gelu", tie_embeddings="none"
    ),
}


def exported(name: str, folder: Path, fault: str = "") -> Path:
    """folder/checkpoint, and what torch exports of it in folder/one and folder/two."""
    save_checkpoint(folder / "checkpoint", CONFIGS[name], random_weights(CONFIGS[name]))
    command = [str(PYTHON), "-I", str(HERE / "with_torch.py"), str(folder / "checkpoint"), str(folder), fault]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        pytest.fail(f"{PYTHON} is not there; run make test-consumers", pytrace=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def validated(folder: Path, layout: str) -> tuple[int, dict]:
    """Exit status and report."""
    path, options = LAYOUTS[layout]
    given = ["validate", str(folder / "checkpoint"), str(folder / path), "--runtimes", "onnxruntime", "--threads", "1"]
    status = main([*given, "--json", str(folder / "report.json"), "--force", *options])
    return status, json.loads((folder / "report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CONFIGS)
def test_right_exports_are_equal(name: str, tmp_path: Path) -> None:
    folder = exported(name, tmp_path)
    for layout in LAYOUTS:
        status, report = validated(folder, layout)
        assert (status, report["verdict"]) == (0, "equal"), report["failures"]
        assert [point["tap"] for point in report["points"]] == ["logits"]
        assert "only logits" in report["notes"][0]


@pytest.mark.parametrize("fault", ["norm_epsilon", "no_scale"])
def test_wrong_exports_are_mismatches(fault: str, tmp_path: Path) -> None:
    folder = exported("post-norm", tmp_path, fault)
    for layout in LAYOUTS:
        status, report = validated(folder, layout)
        assert (status, report["verdict"]) == (1, "mismatch")
        assert report["first_over_budget"] == {"onnxruntime": "logits"}
