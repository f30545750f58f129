"""`validate --against transformers`: the package that published a family judges what was imported and exported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import PYTHON

from export import export_onnx
from mlx_transformer.convert import import_huggingface

pytestmark = pytest.mark.consumers

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "mlx_transformer" / "families" / "golden"
"""Folders that version 4 of transformers wrote, the one that is installed for these tests."""


def validated(checkpoint: Path, package: Path, original: Path, report: Path) -> tuple[int, dict[str, Any]]:
    """Exit status and report, with the consumers' packages in front of this environment's."""
    where = [PYTHON, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-m", "mlx_transformer", "validate", str(checkpoint), str(package), "--seed", "3"]
    command += ["--runtimes", "onnxruntime", "--json", str(report), "--against", "transformers"]
    done = subprocess.run(
        [*command, "--original", str(original)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), site])},
    )
    assert report.is_file(), done.stderr[-1000:]
    return done.returncode, json.loads(report.read_text(encoding="utf-8"))


TRANSLATORS = ["marian", "t5-1.1", "bart-odd", "m2m100", "mbart"]
DECODERS = ["gpt2-wide", "qwen3-window", "gemma2-wide", "gemma3-sixth", "phi3-long", "granite"]


@pytest.mark.parametrize("name", [*TRANSLATORS, *DECODERS])
def test_a_family_is_what_transformers_computes(name: str, tmp_path: Path) -> None:
    theirs = (GOLDEN.with_name("golden_decoders") if name in DECODERS else GOLDEN) / name
    import_huggingface(theirs, tmp_path / "model")
    package = export_onnx(tmp_path / "model", tmp_path / "onnx")
    status, report = validated(tmp_path / "model", package, theirs, tmp_path / "report.json")
    assert (status, report["verdict"]) == (0, "equal"), report["failures"]
    assert report["against"][0].startswith("against transformers 4.")
    judged = [point for point in report["points"] if point["path"] == "against transformers"]
    assert {point["runtime"] for point in judged} == {"checkpoint", "onnxruntime"}
    if name in DECODERS:
        assert " in mlx-lm: " in report["against"][0] or name in ("gpt2-wide", "granite", "gemma3-sixth")
        used, _, given, *_ = report["against"][1].split()
        assert used == given  # with padding on the left too
    searches = {check["search"] for check in report["tokens"] if check["runtime"] == "checkpoint"}
    assert searches >= {"transformers: greedy", "transformers: beam 4"}


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_an_encoder_without_a_pooler_is_what_transformers_computes(inside: str, tmp_path: Path) -> None:
    """Its class has one all the same; and a folder of sentence-transformers may hold it within."""
    theirs = tmp_path / "theirs"
    shutil.copytree(GOLDEN.with_name("golden_encoders") / "bert-hidden", theirs / inside)
    (theirs / "1_Pooling").mkdir()
    (theirs / "1_Pooling" / "config.json").write_text("{}", encoding="utf-8")
    kinds = {"Transformer": inside, "Pooling": "1_Pooling"}
    parts = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
    (theirs / "modules.json").write_text(json.dumps(parts), encoding="utf-8")
    import_huggingface(theirs, tmp_path / "model")
    package = export_onnx(tmp_path / "model", tmp_path / "onnx")
    status, report = validated(tmp_path / "model", package, theirs, tmp_path / "report.json")
    assert (status, report["verdict"]) == (0, "equal"), report["failures"]


def test_another_folder_is_no_original(tmp_path: Path) -> None:
    import_huggingface(GOLDEN / "t5", tmp_path / "model")
    package = export_onnx(tmp_path / "model", tmp_path / "onnx")
    folder = tmp_path / "other"
    folder.mkdir()
    for file in (GOLDEN / "t5").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-3}), encoding="utf-8")
    status, report = validated(tmp_path / "model", package, folder, tmp_path / "report.json")
    assert status == 1
    assert any("checkpoint: first over budget: logits (against transformers" in line for line in report["failures"])
