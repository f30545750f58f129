"""Inner rows that are a cache line longer in target cpu's products: which are, and that nothing else differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import external_data_helper, numpy_helper
from random_models import write_model
from small_models import alone, encoder_decoder

from export import OnnxTransformer
from export.interface import MODEL
from export.precision import passes
from export.precision.row_length import LENGTHENED, LINE, SET_SPAN
from export.validate import compare
from mlx_transformer.core.config import TransformerConfig

WIDE = replace(alone("paper", "encoder"), d_ff=SET_SPAN)
GATED = replace(WIDE, activation="silu", gated=True, feed_forward_bias=False)


def lengthened(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the parameters that have zeros behind them."""
    graphs = [onnx.load(file, load_external_data=False).graph for file in sorted((folder / "onnx").glob("*.onnx"))]
    tensors = (tensor for graph in graphs for tensor in graph.initializer)
    return {tensor.name: tuple(tensor.dims) for tensor in tensors if tensor.name.endswith(LENGTHENED)}


@pytest.mark.fast("config1")
@pytest.mark.parametrize("config", [WIDE, GATED, replace(encoder_decoder("paper"), d_ff=SET_SPAN)])
def test_every_inner_matrix(config: TransformerConfig, tmp_path: Path) -> None:
    checkpoint, cpu = write_model(config, tmp_path, 1, target="cpu", precision=["float32", "float16", "int8"])
    made = lengthened(cpu)
    for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for place in (f"{stack}.layers.{i}.feed_forward" for i in range(layers)):
            assert made.pop(f"{place}.up_proj.weight.{LENGTHENED}") == (SET_SPAN + LINE, config.d_model)
            assert made.pop(f"{place}.down_proj.weight.{LENGTHENED}") == (config.d_model, SET_SPAN + LINE)
            if config.gated:
                assert made.pop(f"{place}.gate_proj.weight.{LENGTHENED}") == (SET_SPAN + LINE, config.d_model)
            if config.feed_forward_bias:
                assert made.pop(f"{place}.up_proj.bias.{LENGTHENED}") == (SET_SPAN + LINE,)
    assert not made
    engines = ["onnxruntime:cpu:all:float32", "onnxruntime:cpu:all:float16"]
    report = compare(checkpoint, cpu, engines, seed=1, threads=1, searches=False)
    assert report.equal, report.failures()


def test_none_where_rows_have_another_length_or_integers(tmp_path: Path) -> None:
    _, cpu = write_model(replace(WIDE, d_ff=SET_SPAN + LINE), tmp_path / "other", 1, target="cpu")
    assert not lengthened(cpu)
    _, cpu = write_model(WIDE, tmp_path / "int8", 1, target="cpu", precision="int8", accept_loss=True)
    assert not lengthened(cpu)
    _, portable = write_model(WIDE, tmp_path / "portable", 1)
    assert not lengthened(portable)


def test_vectors_are_those_of_the_shorter_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [np.random.default_rng(n).integers(3, 50, n).tolist() for n in (1, 5, 12, 30)]
    vectors = []
    for name in ("longer", "as before"):
        _, cpu = write_model(WIDE, tmp_path / name, 1, target="cpu")
        vectors.append(OnnxTransformer(cpu, threads=1).embedder(pooling="mean").vectors(rows, of_text=False))
        monkeypatch.setattr(passes, "lengthen_rows", lambda model: None)
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-6)


def test_a_number_among_the_zeros_is_found(tmp_path: Path) -> None:
    checkpoint, cpu = write_model(WIDE, tmp_path, 1, target="cpu")
    file = cpu / "onnx" / f"{MODEL}.onnx"
    model = onnx.load(file)
    (name, *_) = (name for name in lengthened(cpu) if "down_proj" in name)
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    array = numpy_helper.to_array(tensor).copy()
    array[-1, -1] = 1e-3  # times an activation of 0
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    external_data_helper.convert_model_to_external_data(model, location=f"{MODEL}.onnx_data")
    (cpu / "onnx" / f"{MODEL}.onnx_data").unlink(missing_ok=True)
    onnx.save(model, file)
    report = compare(checkpoint, cpu, ["onnxruntime"], seed=1, threads=1, searches=False)
    assert not report.equal
    assert any("down_proj.weight" in line for line in report.failures()), report.failures()
