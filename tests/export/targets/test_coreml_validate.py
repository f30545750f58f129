"""`validate` on packages of target coreml: equal ones pass for every kind of model, mistakes in a graph are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import combined, thinned
from coreml_models import ARCHITECTURES, SHAPE, config_of
from onnx import numpy_helper
from random_models import random_weights
from small_models import CHOICES

from export import export_onnx
from export.validate import compare, compare_engines
from export.validate.cases import Case
from export.validate.checks.free_running import borders
from export.validate.engines import open_engine
from export.validate.findings import tap_names
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint


def written(folder: Path, name: str, architecture: str) -> tuple[Path, Path]:
    config = config_of(name, architecture)
    save_checkpoint(folder / "model", config, random_weights(config, 1))
    shape = SHAPE[architecture]
    return folder / "model", export_onnx(folder / "model", folder / "fixed", target="coreml", fixed_shape=shape)


@pytest.mark.parametrize(("name", "architecture"), combined(CHOICES, ARCHITECTURES, step=5))
def test_every_kind_of_model(name, architecture, tmp_path):
    """Beside MLX, on inputs as long as the graphs: every tap, all weights, every kind of search."""
    report = compare(*written(tmp_path, name, architecture), ["mlx", "onnxruntime"], seed=1, threads=1)
    assert report.equal, (report.seed, report.failures())
    config = config_of(name, architecture)
    tapped = {point.tap for point in report.points if point.runtime == "onnxruntime" and point.path == "tapped"}
    assert tapped == set(tap_names(config))
    assert [runtime.missing_taps for runtime in report.runtimes] == [(), ()]
    assert len(report.structures) == 2
    longest = SHAPE[architecture].split("x")[1]
    assert any(text.startswith(f"longest (1 x {longest}") for text in report.inputs)
    searches = {t.search: t.tokens for t in report.tokens if t.runtime == "onnxruntime"}
    at_borders = {*borders(config, int(longest))} if config.has_decoder else set()
    assert set(searches) == at_borders | {"top-1, teacher-forced"} | (
        {"greedy", "sampling", "beam 4", "greedy, with rules", "beam 4, with rules"} if config.has_decoder else set()
    )
    assert min(tokens for name, tokens in searches.items() if name not in at_borders) > 10


@pytest.mark.parametrize("runtime", thinned(["onnxruntime:cpu:none", "evaluator"], 2))
def test_other_runtimes_and_a_single_row(runtime, tmp_path):
    """Padding on either side is taken out, rows are portions of the graph's one."""
    config = config_of("modern", "encoder-decoder")
    save_checkpoint(tmp_path / "model", config, random_weights(config, 2))
    fixed = export_onnx(tmp_path / "model", tmp_path / "fixed", target="coreml", fixed_shape="1x6x7")
    checkpoint = open_checkpoint(tmp_path / "model")
    engine = open_engine(runtime, checkpoint, fixed, 1)
    rng = np.random.default_rng(0)
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]], bool)
    ids, targets = np.where(mask, rng.integers(3, 50, mask.shape), 0), rng.integers(3, 50, (3, 4))
    targets[:, 0] = config.bos_id
    report = compare_engines(checkpoint, [engine], [Case("both sides", ids, mask, targets, 1)])
    assert report.equal, report.failures()
    assert report.placements[0].nodes


def unhide(k: int):
    """Reader number k of the masks' constant gets 0 instead."""

    def edit(graph: onnx.GraphProto) -> None:
        readers = [node for node in graph.node if any(name.startswith(HIDDEN) for name in node.input)]
        readers[k].input[:] = ["const_0.0_f32" if name.startswith(HIDDEN) else name for name in readers[k].input]

    return edit


def forget(buffer: str):
    """Where the buffer is multiplied by 1 elsewhere than at the position, 0."""

    def edit(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if buffer in node.input and node.op_type == "Mul")
        node.input[:] = [name if name == buffer else "const_0.0_f32" for name in node.input]

    return edit


def add_to(name: str, place: tuple[int, ...], amount: float):
    def edit(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == name)
        values = numpy_helper.to_array(tensor).copy()
        values[place] += amount
        tensor.CopyFrom(numpy_helper.from_array(values, name))

    return edit


def epsilon(graph: onnx.GraphProto) -> None:
    node = next(n for n in graph.node if n.op_type == "LayerNormalization" and "layers.0/self" in n.name)
    next(a for a in node.attribute if a.name == "epsilon").f = 1e-6


def exchange(graph: onnx.GraphProto) -> None:
    """Keys of one layer's cross-attention and of the other's."""
    names = {"present.0.encoder.key": "present.1.encoder.key", "present.1.encoder.key": "present.0.encoder.key"}
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]


HIDDEN = "const_-30000"
MISTAKES = {
    "what is behind the position is seen": ("decoder", unhide(0), "self_attention"),
    "padding of the source is seen": ("decoder", unhide(1), "cross_attention"),
    "the buffer of keys forgets": ("decoder", forget("past_key_values.0.decoder.key"), "self_attention"),
    "a position's row": ("decoder", add_to("positions.sinusoids", (3, 5), 1e-6), "embedding"),
    "a norm's epsilon": ("encoder", epsilon, "feed_forward"),
    "keys of the wrong layer": ("encoder", exchange, "cross_attention"),
    "one weight": ("encoder", add_to("encoder.layers.0.self_attention.value_proj.weight", (1, 2), 1e-3), ""),
}


@pytest.mark.parametrize("mistake", thinned(MISTAKES, 2))
def test_mistakes_are_found_where_they_are(mistake, tmp_path):
    part, edit, tap = MISTAKES[mistake]
    checkpoint, package = written(tmp_path, "paper", "encoder-decoder")
    path = package / "onnx" / f"{part}_coreml.onnx"
    model = onnx.load(path)
    before = model.SerializeToString()
    edit(model.graph)
    assert model.SerializeToString() != before
    path.write_bytes(model.SerializeToString())
    report = compare(checkpoint, package, ["onnxruntime"], seed=4, threads=1, searches=False)
    assert report.exit_code == 1
    if tap:
        side = "encoder" if part == "encoder" and mistake != "keys of the wrong layer" else "decoder"
        layer = "" if tap == "embedding" else "layers.0."
        assert report.first_over_budget("onnxruntime").tap == f"{side}.{layer}{tap}"
        assert all(check.passed for check in report.weights)
    else:
        assert any("value_proj.weight: 1 of " in problem for w in report.weights for problem in w.problems)
