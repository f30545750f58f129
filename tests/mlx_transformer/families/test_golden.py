"""Folders that `transformers` wrote, and what it computed with them (`make_golden.py`): the same logits and tokens
here, in MLX and in exported graphs, and the same files again.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from combined import combined
from safetensors.numpy import load_file

from export import OnnxTransformer, export_onnx
from export.targets.table import TARGETS
from export.validate import compare
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint

GOLDEN = Path(__file__).parent / "golden"
PAPER = ("marian", "pegasus")
"""Families of the paper's network, which the tests of targets have."""
NAMES = sorted(path.name for path in GOLDEN.iterdir())


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, by the names."""
    folder = tmp_path_factory.mktemp("golden")
    for name in NAMES:
        import_huggingface(GOLDEN / name, folder / name)
    return folder


def answers(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / name / "answers.npz"))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_equal_by_the_rule(name: str, imported: Path) -> None:
    given = answers(name)
    ids, mask, target = given["ids"], given["mask"].astype(bool), given["target"]
    opened = open_checkpoint(imported / name)
    weights = dict(opened.tensors())
    truth64, truth32 = (Reference(opened.config, weights, kind)(ids, target, mask) for kind in (np.float64, np.float32))
    truth = Truth.of(truth64, truth32, np.ones(target.shape, bool))
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    in_mlx = np.array(Transformer.load(imported / name)(mx.array(ids), mx.array(target), mx.array(mask)))
    for runtime, logits in {"transformers": given["logits"], "mlx": in_mlx}.items():
        measured = Measurement.of(Deviation.of(logits, truth), truth.scale, pool, budget)
        assert measured.passed, f"{runtime}: {measured}"


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_equal(name: str, imported: Path, tmp_path: Path) -> None:
    given, eos = answers(name), open_checkpoint(imported / name).config.eos_id
    rows = [ids[real].tolist() for ids, real in zip(given["ids"], given["mask"].astype(bool), strict=True)]
    expected = [row[: row.index(eos)] if eos in row else row for row in given["tokens"].tolist()]
    new = given["tokens"].shape[1]
    assert Transformer.load(imported / name).generate(rows, beam=1, max_new_tokens=new) == expected
    export_onnx(imported / name, tmp_path / "onnx")
    assert OnnxTransformer(tmp_path / "onnx", threads=1).generate(rows, beam=1, max_new_tokens=new) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_written_again(name: str, imported: Path, tmp_path: Path) -> None:
    """Each tensor bit for bit, and each key that means anything."""
    model_type = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))["model_type"]
    written = to_huggingface(imported / name, tmp_path / "theirs", model_type)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, written))
    assert {key for key in theirs if "embed_positions" not in key} == ours.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
    before, after = (json.loads((f / "config.json").read_text(encoding="utf-8")) for f in (GOLDEN / name, written))
    differing = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    assert differing <= {"activation_function"}  # which has two words for silu
    assert differing <= {name for name in before if before[name] == "swish"}


@pytest.mark.parametrize("name", ["t5", "t5-1.1", "marian"])
def test_optimums_folder_of_any_family_opens(name: str, imported: Path, tmp_path: Path) -> None:
    """Its graphs have the names of ours, and its config.json is the published model's."""
    folder = export_onnx(imported / name, tmp_path / "onnx")
    ours = OnnxTransformer(folder, threads=1)
    for file in ("mlx_transformer.json", "manifest.json"):
        (folder / file).unlink()
    (folder / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
    theirs = OnnxTransformer(folder, threads=1)
    assert theirs.config == open_checkpoint(imported / name).config
    rows = [[5, 6, 7, 8], [9, 4]]
    assert theirs.search(rows, beam=3, max_new_tokens=8) == ours.search(rows, beam=3, max_new_tokens=8)


@pytest.mark.parametrize(("name", "target"), combined([name for name in NAMES if name not in PAPER], TARGETS))
def test_validate_finds_every_target_equal(name: str, target: str, imported: Path, tmp_path: Path) -> None:
    shape = {"fixed_shape": "2x12x10"} if target == "coreml" else {}
    export_onnx(imported / name, tmp_path / "onnx", target=target, **shape)
    engines = ["mlx", "onnxruntime"] if target == "portable" else ["onnxruntime"]
    report = compare(imported / name, tmp_path / "onnx", engines, 3, threads=1)
    assert report.equal, report.failures()
