"""Products of the same integers in one: target cpu's encoder alone in int8, whose matrices lie side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import thinned, thinned_rows
from random_models import random_weights, write_model
from small_models import alone

from export import OnnxTransformer, export_onnx
from export.interface import MODEL
from export.precision import int8
from export.precision.table import PRECISIONS
from export.validate import compare
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import INT8_SCALES, SIGNED, Int8Scales, ProductScales
from mlx_transformer.core.parameters import quantizable_shapes

PLAIN = alone("paper", "encoder")
GATED = replace(PLAIN, activation="silu", gated=True, feed_forward_bias=False)
OPTIONS = {"target": "cpu", "precision": "int8", "accept_loss": True}
FILE = f"onnx/{MODEL}{PRECISIONS['int8'].suffix}.onnx"


def with_attention_fixed(config: TransformerConfig, folder: Path) -> tuple[Path, Path]:
    """Write a model whose attention has fixed scales, beyond which nothing comes, and its package."""
    read, joined = ProductScales(np.float32(20), SIGNED), ProductScales(np.float32(25), SIGNED)
    products = {name: joined if name.endswith("output_proj.weight") else read for name in quantizable_shapes(config)}
    scales = Int8Scales({name: products[name] if "attention" in name else ProductScales() for name in products})
    checkpoint = save_checkpoint(
        folder / "model", config, random_weights(config, 1), texts={INT8_SCALES: scales.json()}
    )
    return checkpoint, export_onnx(checkpoint, folder / "cpu", **OPTIONS)


def together(folder: Path) -> list[list[str]]:
    """Return the matrices of each product that has several."""
    graph = onnx.load(folder / FILE, load_external_data=False).graph
    joined = {node.output[0]: [*node.input] for node in graph.node if node.op_type == "Concat"}
    products = [node for node in graph.node if node.op_type == "MatMulIntegerToFloat"]
    return [joined[node.input[1]] for node in products if node.input[1] in joined]


@pytest.mark.fast("config1")
@pytest.mark.parametrize("config", [PLAIN, GATED])
def test_all_that_read_the_same_integers(config: TransformerConfig, tmp_path: Path) -> None:
    checkpoint, cpu = write_model(config, tmp_path, 1, **OPTIONS)
    expected = []
    for layer in range(config.encoder_layers):
        place = f"encoder.layers.{layer}"
        expected.append({f"{place}.self_attention.{name}_proj.weight.int8" for name in ("query", "key", "value")})
        if config.gated:
            expected.append({f"{place}.feed_forward.{name}_proj.weight.int8" for name in ("gate", "up")})
    assert [set(each) for each in together(cpu)] == expected
    report = compare(
        checkpoint, cpu, ["onnxruntime:cpu:all:int8", "onnxruntime:cpu:none:int8"], seed=1, threads=1, searches=False
    )
    assert report.equal, report.failures()


@pytest.mark.fast("config3-1", "config5-1")
@pytest.mark.parametrize(
    ("config", "splits"),
    [
        (PLAIN, 0),
        (replace(PLAIN, key_value_heads=2), 1),
        (replace(PLAIN, attention_bias=True), 0),
        (replace(PLAIN, d_v=6), 1),
        (replace(PLAIN, positions="rotary"), 1),
        (GATED, 1),
    ],
)
def test_heads_are_gathered_from_the_rows_of_all(config: TransformerConfig, splits: int, tmp_path: Path) -> None:
    """Where heads have one width, and nothing else becomes of what a product gives: keys of fewer heads are
    repeated first, rotary ones turned."""
    checkpoint, cpu = write_model(config, tmp_path, 1, **OPTIONS)
    graph = onnx.load(cpu / FILE, load_external_data=False).graph
    assert (
        sum(node.op_type == "Split" and "_proj" in node.input[0] for node in graph.node)
        == splits * config.encoder_layers
    )
    report = compare(
        checkpoint, cpu, ["onnxruntime:cpu:all:int8", "onnxruntime:cpu:none:int8"], seed=1, threads=1, searches=False
    )
    assert report.equal, report.failures()


@pytest.mark.parametrize("config", [GATED, PLAIN, replace(PLAIN, attention_bias=True)])
def test_vectors_are_those_of_products_apart(
    config: TransformerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [np.random.default_rng(n).integers(3, 50, n).tolist() for n in (1, 5, 12, 30)]
    vectors = []
    for name in ("together", "apart"):
        _, cpu = write_model(config, tmp_path / name, 1, **OPTIONS)
        assert bool(together(cpu)) is (name == "together")
        vectors.append(OnnxTransformer(cpu, threads=1).embedder(pooling="mean").vectors(rows, of_text=False))
        monkeypatch.setattr(int8, "MODEL", "no graph")
    assert np.array_equal(*vectors)


@pytest.mark.fast("config0")
@pytest.mark.parametrize(
    "config", thinned([replace(PLAIN, attention_bias=True), PLAIN, replace(PLAIN, positions="rotary")], 2)
)
def test_attention_has_its_biases_within_where_its_scales_are_fixed(
    config: TransformerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rows of feed-forward nets and of the head are looked through for their largest magnitude, and the bits
    are those of products apart."""
    rows = [np.random.default_rng(n).integers(3, 50, n).tolist() for n in (1, 5, 12, 30)]
    vectors = []
    for name in ("together", "apart"):
        checkpoint, cpu = with_attention_fixed(config, tmp_path / name)
        nodes = onnx.load(cpu / FILE, load_external_data=False).graph.node
        assert sum(node.op_type == "ReduceMax" for node in nodes) == 2 * config.encoder_layers + 1  # the head
        with_bias = [node for node in nodes if node.op_type == "MatMulIntegerToFloat" and len(node.input) == 7]
        count = {"together": 2, "apart": 4}[name] * config.attention_bias
        assert len(with_bias) == count * config.encoder_layers
        vectors.append(OnnxTransformer(cpu, threads=1).embedder(pooling="mean").vectors(rows, of_text=False))
        report = compare(
            checkpoint,
            cpu,
            ["onnxruntime:cpu:all:int8", "onnxruntime:cpu:none:int8"],
            seed=1,
            threads=1,
            searches=False,
        )
        assert report.equal, report.failures()
        monkeypatch.setattr(int8, "MODEL", "no graph")
    assert np.array_equal(*vectors)


def test_scales_in_another_order_are_found(tmp_path: Path) -> None:
    checkpoint, cpu = with_attention_fixed(PLAIN, tmp_path)
    model = onnx.load(cpu / FILE, load_external_data=False)
    scales = next(node for node in model.graph.node if node.op_type == "Concat" and "scale" in node.input[0])
    scales.input[0], scales.input[1] = scales.input[1], scales.input[0]
    onnx.save(model, cpu / FILE)
    report = compare(checkpoint, cpu, ["onnxruntime:cpu:all:int8"], seed=1, threads=1, searches=False)
    assert any("its result has the scales" in problem for problem in report.structures[0].wrong), report.structures


@pytest.mark.fast("relu--100")
@pytest.mark.parametrize(
    ("activation", "least"), thinned_rows([("relu", -100), ("gelu", -0.75), ("gelu_tanh", -0.75)], 2)
)
def test_rows_without_a_number_above_zero(activation: str, least: float, tmp_path: Path) -> None:
    """Behind a Relu the largest number of a row of zeros is 0, whose reciprocal isn't finite; behind a Gelu, whose
    least is -0.17 at -0.75, the largest may be less than the largest magnitude."""
    config = replace(PLAIN, activation=activation)
    weights = random_weights(config, 1)
    for name in weights:
        if name.endswith("up_proj.bias"):
            weights[name][:] = least
        elif name.endswith("up_proj.weight") and least > -1:
            weights[name][:] *= np.float32(1e-3)
    checkpoint = save_checkpoint(tmp_path / "model", config, weights)
    for target in ("cpu", "portable"):
        folder = export_onnx(checkpoint, tmp_path / target, **OPTIONS | {"target": target})
        engines = ["onnxruntime:cpu:all:int8", "onnxruntime:cpu:none:int8"]
        report = compare(checkpoint, folder, engines, seed=1, threads=1, searches=False)
        assert report.equal, report.failures()


def test_matrices_in_another_order_are_found(tmp_path: Path) -> None:
    checkpoint, cpu = write_model(PLAIN, tmp_path, 1, **OPTIONS)
    model = onnx.load(cpu / FILE, load_external_data=False)
    first = next(node for node in model.graph.node if node.op_type == "Concat" and "int8" in node.input[0])
    first.input[0], first.input[1] = first.input[1], first.input[0]
    onnx.save(model, cpu / FILE)
    report = compare(checkpoint, cpu, ["onnxruntime:cpu:all:int8"], seed=1, threads=1, searches=False)
    assert not report.equal
