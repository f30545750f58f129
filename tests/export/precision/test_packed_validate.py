"""`validate` on packages of precision `packed`: the integers of a checkpoint quantised by MLX in block operators."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import combined, thinned_rows
from onnx import numpy_helper
from quantized_models import NAMES, SCHEMES, wide
from random_models import random_weights, write_model
from runtimes import unasked

from export import export_onnx
from export.precision.packed import from_bytes, in_bytes
from export.validate import compare
from export.validate.engines.stored import matrix_of
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.quantization import Scheme


def written(folder: Path, scheme: Scheme, target: str, precision="packed", **changes) -> tuple[Path, Path]:
    return write_model(wide(**changes), folder, 3, scheme, precision=precision, target=target)


EACH = list(zip(SCHEMES[::4], cycle(["portable", "cpu"]), strict=False))


@pytest.mark.parametrize(("scheme", "target"), thinned_rows(EACH, 5), ids=NAMES[::4])
def test_every_number_of_bits(scheme, target, tmp_path):
    """With a classifier of its own too; MLX, and whichever precisions the folder holds, without being asked for."""
    both = ["float32", "packed"]
    paths = written(tmp_path, scheme, target, both, tie_embeddings="none" if scheme.bits == 4 else "all")
    report = compare(*paths, longest=12, threads=1)
    assert report.equal, (report.seed, report.failures())
    assert [r.precision for r in report.runtimes] == ["float32"] * len(unasked()) + ["packed"]
    weights = [check for check in report.weights if check.runtime == "onnxruntime:cpu:all:packed"]
    assert sum(check.count for check in weights) >= len(open_checkpoint(paths[0]).quantization)
    assert {t.search for t in report.tokens if t.runtime.endswith("packed")} >= {"greedy", "sampling", "beam 4"}


def test_what_stays_in_its_exact_form(tmp_path):
    """A matrix whose zero points aren't whole, beside packed ones."""
    config, name = wide(), "decoder.layers.0.self_attention.key_proj.weight"
    weights = random_weights(config, 3)
    weights[name] = np.abs(weights[name]) + 1
    save_checkpoint(tmp_path / "plain", config, weights)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "q", Scheme(64, 8))
    package = export_onnx(tmp_path / "q", tmp_path / "cpu", precision="packed", target="cpu")
    report = compare(tmp_path / "q", package, ["onnxruntime"], longest=12, threads=1, searches=False)
    assert report.equal, (report.seed, report.failures())


@pytest.mark.fast("scales-cpu")
@pytest.mark.parametrize(("part", "target"), combined(["blocks", "scales", "zeros"], ["portable", "cpu"]))
def test_mistakes_are_found(part, target, tmp_path):
    """One number of one matrix, and by its name."""
    checkpoint, package = written(tmp_path, Scheme(32, 8), target)
    graph = "decoder_cpu" if target == "cpu" else "decoder_model"
    path = package / "onnx" / f"{graph}_packed.onnx"
    model = onnx.load(path)
    name = "decoder.layers.0.feed_forward.up_proj.weight"
    tensor = next(t for t in model.graph.initializer if t.name == f"{name}.{part}")
    values = numpy_helper.to_array(tensor).copy()
    values.flat[5] = np.nextafter(values.flat[5], 9, dtype=np.float32) if part == "scales" else values.flat[5] ^ 1
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    path.write_bytes(model.SerializeToString())
    report = compare(checkpoint, package, ["onnxruntime"], seed=1, longest=8, threads=1, searches=False)
    problems = [problem for check in report.weights for problem in check.problems]
    assert report.exit_code == 1
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}: ")


def test_another_matrix_than_the_checkpoints_is_no_rounding(tmp_path):
    checkpoint, _ = written(tmp_path, Scheme(32, 4), "portable")
    opened, name = open_checkpoint(checkpoint), "embedding.weight"
    dense = dict(opened.tensors())[name]
    read = matrix_of(opened.packed(name), dense)
    assert 0 < np.abs(read - dense).max() < 1e-6
    other = dense.copy()
    other[3, 4] += 1e-4
    assert matrix_of(opened.packed(name), other) is other


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes_there_and_back(bits):
    values = np.random.default_rng(bits).integers(0, 2**bits, (3, 9)).astype(np.uint8)
    np.testing.assert_array_equal(from_bytes(in_bytes(values, bits), bits)[:, :9], values)
