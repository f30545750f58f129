"""Target coreml: tables and classifiers of more rows than Core ML takes, in parts that compute what the whole does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import thinned_rows
from coreml_models import SHAPE, config_of
from onnx import numpy_helper
from random_models import random_weights, write_model
from small_models import CHOICES

from export import OnnxTransformer, export_onnx
from export.graph.built import forget
from export.targets.coreml import rows as splitting
from export.targets.coreml.graphs import OPERATORS
from export.targets.coreml.shape import joined, parts_of
from export.validate import compare
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.quantization import Scheme

NARROW = dict(d_model=16, d_k=4, d_v=3, d_ff=12, decoder={})
"""Nothing but vocabularies (50 and 60) and positions (40) is longer than 16."""
# Every kind of model, each architecture at least twice.
KINDS = [
    *(("encoder-decoder", name) for name in CHOICES),
    *(("encoder", name) for name in ("odd widths", "untied")),
    *(("decoder", name) for name in ("modern", "two vocabularies")),
]


@pytest.fixture
def short(monkeypatch):
    """Parts of 16 rows; graphs that other tests have built are of the whole."""
    forget()
    monkeypatch.setattr(splitting, "LIMIT", 16)
    yield
    forget()


def graphs_of(package: Path) -> list[onnx.ModelProto]:
    return [onnx.load(file) for file in sorted((package / "onnx").glob("*.onnx"))]


@pytest.mark.parametrize(("architecture", "name"), thinned_rows(KINDS, 4))
def test_no_tensor_is_longer_than_the_limit(architecture, name, short, tmp_path):
    config = replace(config_of(name, architecture), **NARROW)
    shape = "2x4x7" if architecture == "encoder-decoder" else "2x4"
    _, package = write_model(config, tmp_path, target="coreml", fixed_shape=shape)
    for model in graphs_of(package):
        graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
        known = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}
        assert {output for node in graph.node for output in node.output} <= known.keys()
        extents = {name: [d.dim_value for d in value.type.tensor_type.shape.dim] for name, value in known.items()}
        extents |= {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        assert max(max(axes, default=0) for axes in extents.values()) == 16
        assert all(min(axes, default=1) > 0 for axes in extents.values())
        assert {node.op_type for node in graph.node} <= OPERATORS
        assert "logits" not in extents


@pytest.mark.parametrize(("architecture", "name"), thinned_rows(KINDS, 6))
def test_parts_are_equal_to_the_whole(architecture, name, short, tmp_path):
    """By `validate`: weights bit for bit, every tap, logits, the structure, searches."""
    options = dict(target="coreml", fixed_shape=SHAPE[architecture])
    report = compare(*write_model(config_of(name, architecture), tmp_path, 1, **options), ["onnxruntime"], threads=1)
    assert report.equal, report.failures()
    assert all(structure.passed for structure in report.structures)
    assert max(check.count for check in report.weights) > 10


def test_quantised_checkpoints(short, tmp_path):
    """The integers of each part are those of its rows."""
    config = config_of("untied", "encoder-decoder")
    options = dict(scheme=Scheme(32, 4), target="coreml", fixed_shape="2x6x7")
    report = compare(*write_model(config, tmp_path, 1, **options), ["onnxruntime"], threads=1, searches=False)
    assert report.equal, report.failures()


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[TransformerConfig, Path, Path]:
    """20,000 words and 17,000 positions, every table and the classifier's bias among the parameters."""
    config = TransformerConfig(
        vocab_size=20000,
        d_model=16,
        heads=2,
        d_ff=24,
        encoder_layers=1,
        decoder_layers=1,
        max_positions=17000,
        positions="learned",
        output_bias=True,
    )
    checkpoint, package = write_model(config, tmp_path_factory.mktemp("large"), 3, target="coreml", fixed_shape="2x5x6")
    return config, checkpoint, package


def test_a_vocabulary_of_20000_words(large):
    _, checkpoint, package = large
    report = compare(checkpoint, package, ["onnxruntime"], threads=1)
    assert report.equal, report.failures()
    for model in graphs_of(package):
        graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
        values = (*graph.input, *graph.output, *graph.value_info)
        extents = [d.dim_value for value in values for d in value.type.tensor_type.shape.dim]
        assert max(extents + [d for tensor in graph.initializer for d in tensor.dims]) == splitting.LIMIT == 16384


def test_tokens_on_both_sides_of_the_limit(large, tmp_path):
    _, checkpoint, package = large
    fixed, portable = OnnxTransformer(package), OnnxTransformer(export_onnx(checkpoint, tmp_path / "portable"))
    rows = [[5, 16383, 16384, 19999], [19999], [16385, 6]]
    options = dict(beam=2, max_new_tokens=5, n_best=2)
    for by_coreml, by_portable in zip(fixed.search(rows, **options), portable.search(rows, **options), strict=True):
        assert [h.ids for h in by_coreml] == [h.ids for h in by_portable]
    tokens = {token for row in fixed.generate(rows, max_new_tokens=5) for token in row}
    assert max(tokens) >= 16384 > min(tokens)


def test_the_data_file_has_each_parameter_once_as_it_is(large):
    config, _, package = large
    data = (package / "onnx" / "model.onnx_data").read_bytes()
    weights = random_weights(config, 3)
    for name in ("embedding.weight", "encoder.positions.weight", "output_proj.bias"):
        assert data.count(weights[name].tobytes()) == 1, name
    assert len(data) < 4 * sum(values.size for values in weights.values()) * 1.01 + 64 * len(weights)


def test_one_row_less_and_nothing_is_split(monkeypatch, tmp_path):
    monkeypatch.setattr(splitting, "LIMIT", 50)
    _, package = write_model(config_of("paper", "decoder"), tmp_path, target="coreml", fixed_shape="1x7")
    (model,) = graphs_of(package)
    assert not parts_of([*(tensor.name for tensor in model.graph.initializer), *(o.name for o in model.graph.output)])
    assert "logits" in {output.name for output in model.graph.output}


def test_parts_in_their_order():
    parts = {f"a.rows_{k}": np.full((2, 1), k) for k in (10, 2, 0)}
    assert parts_of(parts) == {"a": ["a.rows_0", "a.rows_2", "a.rows_10"]}
    tensors = joined({**parts, "b": np.ones(3)}, 0)
    assert tensors.keys() == {"a", "b"}
    assert tensors["a"][:, 0].tolist() == [0, 0, 2, 2, 10, 10]


def exchange(first: str, second: str):
    """Whoever reads one of the two reads the other."""

    def edit(graph: onnx.GraphProto) -> None:
        names = {first: second, second: first}
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    return edit


def one_weight(graph: onnx.GraphProto) -> None:
    tensor = next(t for t in graph.initializer if t.name == "embedding.weight.rows_2")
    values = numpy_helper.to_array(tensor).copy()
    values[3, 1] += 1e-3
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def twice(graph: onnx.GraphProto) -> None:
    """A product of the second part that nobody reads."""
    product = next(node for node in graph.node if node.op_type == "MatMul" and "rows_1" in node.name)
    copy = graph.node.add()
    copy.CopyFrom(product)
    copy.name, copy.output[0], copy.input[1] = "again", "again", "embedding.weight.rows_0/transposed"


MISTAKES = {
    "rows of another part": exchange("embedding.weight.rows_0", "embedding.weight.rows_1"),
    "logits of another part": exchange("embedding.weight.rows_0/transposed", "embedding.weight.rows_1/transposed"),
    "one weight of a part": one_weight,
    "a product too many": twice,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, short, tmp_path):
    config = config_of("paper", "encoder-decoder")
    checkpoint, package = write_model(config, tmp_path, 1, target="coreml", fixed_shape="2x6x7")
    path = package / "onnx" / "decoder_coreml.onnx"
    model = onnx.load(path)
    MISTAKES[mistake](model.graph)
    path.write_bytes(model.SerializeToString())
    report = compare(checkpoint, package, ["onnxruntime"], seed=4, threads=1, searches=False)
    assert report.exit_code == 1
    if mistake == "rows of another part":
        assert report.first_over_budget("onnxruntime").tap == "decoder.embedding"
    elif mistake == "logits of another part":
        assert report.first_over_budget("onnxruntime").tap == "logits"
    elif mistake == "one weight of a part":
        assert any("embedding.weight: 1 of " in problem for check in report.weights for problem in check.problems)
    else:
        assert not all(structure.passed for structure in report.structures)
