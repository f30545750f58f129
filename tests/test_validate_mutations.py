"""Bugs put into an exported model, or into the model in MLX: `validate` finds each one, and at the right place."""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from random_models import write_model

from export.validate import compare, compare_engines
from export.validate.cases import grid
from export.validate.engines.mlx_engine import MlxEngine
from mlx_transformer.spec.checkpoint import open_checkpoint
from mlx_transformer.spec.config import TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=60, d_model=32, heads=4, d_ff=48, encoder_layers=2, decoder_layers=2, attention_bias=True,
    max_positions=40, activation="gelu", tie_embeddings="target-output",
)  # fmt: skip
SEED = 11

Edit = Callable[[onnx.ModelProto], None]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model(CONFIG, tmp_path_factory.mktemp("exported"), seed=3)


def weight(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Replace an initializer wherever it is."""

    def edit(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name == name:
                array = change(numpy_helper.to_array(tensor).copy())
                tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))

    return edit


def node(op_type: str, scope: str, change: Callable[[onnx.NodeProto], None]) -> Edit:
    """Change the first node of a type whose name starts with a scope."""

    def edit(model: onnx.ModelProto) -> None:
        found = [n for n in model.graph.node if n.op_type == op_type and n.name.startswith(scope)]
        for first in found[:1]:
            change(first)

    return edit


def epsilon(value: float) -> Callable[[onnx.NodeProto], None]:
    def change(n: onnx.NodeProto) -> None:
        next(a for a in n.attribute if a.name == "epsilon").f = value

    return change


def become(op_type: str, **attributes: str) -> Callable[[onnx.NodeProto], None]:
    def change(n: onnx.NodeProto) -> None:
        n.op_type = op_type
        del n.attribute[:]
        n.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in attributes.items())

    return change


def swap_inputs(n: onnx.NodeProto) -> None:
    n.input[0], n.input[1] = n.input[1], n.input[0]


def one_more(input_index: int, value: float | int) -> Callable[[onnx.ModelProto, str, str], Edit]:
    """Add a constant to one input of a node."""

    def at(op_type: str, scope: str) -> Edit:
        def edit(model: onnx.ModelProto) -> None:
            for i, n in enumerate(model.graph.node):
                if n.op_type == op_type and n.name.startswith(scope):
                    kind = np.float32 if isinstance(value, float) else np.int64
                    model.graph.initializer.append(numpy_helper.from_array(np.array(value, kind), "one_more"))
                    added = onnx.helper.make_node("Add", [n.input[input_index], "one_more"], ["one_more_out"])
                    n.input[input_index] = "one_more_out"
                    model.graph.node.insert(i, added)
                    return

        return edit

    return at


def constant(old: float, new: float, consumer: str) -> Edit:
    """Another value for a scalar that nodes of one scope read."""

    def edit(model: onnx.ModelProto) -> None:
        scalars = {
            t.name for t in model.graph.initializer
            if not t.dims and t.data_type == onnx.TensorProto.FLOAT and np.isclose(numpy_helper.to_array(t), old)
        }  # fmt: skip
        changed = False
        for n in model.graph.node:
            if n.name.startswith(consumer):
                for i, name in enumerate(n.input):
                    if name in scalars:
                        n.input[i], changed = "changed_constant", True
        if changed:
            model.graph.initializer.append(numpy_helper.from_array(np.array(new, np.float32), "changed_constant"))

    return edit


def swap_heads(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(4, 8, -1)[[1, 0, 2, 3]].reshape(rows.shape)


def one_bit(array: np.ndarray) -> np.ndarray:
    array.reshape(-1).view(np.uint32)[5] ^= 1
    return array


def one_zero(array: np.ndarray) -> np.ndarray:
    array[3, 4] = 0
    return array


@dataclass(frozen=True)
class Mutation:
    """`files`: the graphs it is put into. What finds it: `weights`, a parameter's name, and `tap` on `path`, the first
    point over budget; empty where that kind of check sees nothing."""

    edit: Edit
    files: str = "*"
    weights: str = ""
    tap: str = ""
    path: str = "tapped"


E1, D0, D1 = "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"
ONNX_MUTATIONS = {
    "norm epsilon 1e-6 for 1e-5": Mutation(
        node("LayerNormalization", "encoder/layers.0/feed_forward_norm", epsilon(1e-6)), tap="encoder.layers.0"
    ),
    "value bias times .99": Mutation(
        weight(f"{E1}.self_attention.value_proj.bias", lambda x: x * 0.99),
        weights=f"{E1}.self_attention.value_proj.bias",
        tap=f"{E1}.self_attention",
    ),
    "one weight zero": Mutation(
        weight(f"{D0}.feed_forward.up_proj.weight", one_zero),
        weights=f"{D0}.feed_forward.up_proj.weight",
        tap=f"{D0}.feed_forward",
    ),
    "positions + 1e-6": Mutation(weight("positions.sinusoids", lambda x: x + 1e-6), tap="encoder.embedding"),
    "positions off by one": Mutation(
        weight("positions.sinusoids", lambda x: np.roll(x, -1, axis=0)), files="encoder*", tap="encoder.embedding"
    ),
    "key bias dropped": Mutation(
        weight(f"{E1}.self_attention.key_proj.bias", np.zeros_like), weights=f"{E1}.self_attention.key_proj.bias"
    ),
    "weights rounded to float16": Mutation(
        weight(f"{D1}.cross_attention.query_proj.weight", lambda x: x.astype(np.float16)),
        weights=f"{D1}.cross_attention.query_proj.weight",
        tap=f"{D1}.cross_attention",
    ),
    "two heads swapped": Mutation(
        weight(f"{D0}.self_attention.query_proj.weight", swap_heads),
        weights=f"{D0}.self_attention.query_proj.weight",
        tap=f"{D0}.self_attention",
    ),
    "one bit of one weight": Mutation(
        weight(f"{E1}.feed_forward.down_proj.weight", one_bit), weights=f"{E1}.feed_forward.down_proj.weight"
    ),
    "a projection transposed": Mutation(
        weight(f"{D0}.cross_attention.output_proj.weight", np.transpose),
        weights=f"{D0}.cross_attention.output_proj.weight",
        tap=f"{D0}.cross_attention",
    ),
    "padding not masked": Mutation(
        constant(-1e9, 0.0, "Where"), files="encoder*", tap="encoder.layers.0.self_attention"
    ),
    "source padding not masked in the decoder": Mutation(
        node("Where", "Where_node_4", lambda n: n.input.__setitem__(2, n.input[1])),
        files="decoder_with_past*",
        tap=f"{D0}.cross_attention",
        path="cached, tapped",
    ),
    "causal mask without the diagonal": Mutation(
        node("LessOrEqual", "", become("Less")), files="decoder_model", tap=f"{D0}.self_attention"
    ),
    "no causal mask at all": Mutation(
        node("LessOrEqual", "", become("GreaterOrEqual")), files="decoder_model", tap=f"{D0}.self_attention"
    ),
    "no scale in one attention": Mutation(
        constant(8**-0.5, 1.0, "decoder/layers.1/self_attention"),
        files="decoder_model",
        tap=f"{D1}.self_attention",
    ),
    "embedding scale a little off": Mutation(
        constant(32**0.5, float(np.nextafter(np.float32(32**0.5), np.float32(9))), "Mul"),
        files="encoder*",
        tap="encoder.embedding",
    ),
    "gelu in its tanh form": Mutation(
        node("Gelu", "encoder/layers.1", become("Gelu", approximate="tanh")), tap=f"{E1}.feed_forward"
    ),
    "relu for gelu": Mutation(
        node("Gelu", "decoder/layers.0", become("Relu")), files="decoder_model", tap=f"{D0}.feed_forward"
    ),
    "cache in the wrong order": Mutation(
        node("Concat", "decoder/layers.1", swap_inputs),
        files="decoder_with_past*",
        tap=f"{D1}.self_attention",
        path="cached, tapped",
    ),
    "positions of steps off by one": Mutation(
        one_more(1, 1)("Gather", "decoder/positions"),
        files="decoder_with_past*",
        tap="decoder.embedding",
        path="cached, tapped",
    ),
    "a mistake in the merged graph alone": Mutation(
        node("Concat", "decoder/layers.1", swap_inputs),
        files="*merged*",
        tap=f"{D1}.self_attention",
        path="cached, merged, tapped",
    ),
    "no residual around one sub-layer": Mutation(
        node("Add", "encoder/layers.1/Add", lambda n: n.input.__setitem__(0, n.input[1])), tap=f"{E1}.feed_forward"
    ),
}


def mutated(exported: tuple[Path, Path], mutation: Mutation, folder: Path) -> Path:
    copy = folder / "onnx"
    shutil.copytree(exported[1], copy)
    changed = 0
    for path in sorted(copy.glob(f"onnx/{mutation.files}.onnx")):
        model = onnx.load(path)
        before = model.SerializeToString(deterministic=True)
        mutation.edit(model)
        changed += model.SerializeToString(deterministic=True) != before
        onnx.save(model, path)
    assert changed, "the mutation found nothing to change"
    return copy


@pytest.mark.parametrize("name", ONNX_MUTATIONS)
def test_a_bug_in_the_onnx_files_is_found_where_it_is(name: str, exported: tuple[Path, Path], tmp_path: Path) -> None:
    mutation = ONNX_MUTATIONS[name]
    report = compare(exported[0], mutated(exported, mutation, tmp_path), ["onnxruntime"], SEED, threads=1)
    assert report.verdict == "mismatch"
    assert report.exit_code == 1
    wrong = {problem.split(":")[0] for check in report.weights for problem in check.problems}
    assert wrong == ({mutation.weights} if mutation.weights else set())
    first = report.first_over_budget("onnxruntime")
    assert (first and (first.tap, first.path)) == ((mutation.tap, mutation.path) if mutation.tap else None)


def test_the_unmutated_files_pass(exported: tuple[Path, Path]) -> None:
    report = compare(*exported, ["onnxruntime"], SEED, threads=1)
    assert report.equal, report.failures()


def mlx_epsilon(model: Any) -> None:
    model.decoder.layers[1].cross_attention_norm.epsilon = 1e-6


def mlx_one_bit(model: Any) -> None:
    projection = model.decoder.layers[0].self_attention.key_proj
    projection.weight = type(projection.weight)(one_bit(np.array(projection.weight)))


def mlx_stale_row(model: Any) -> None:
    step = model.step

    def stale(ids, cache, **named):
        logits = step(ids, cache, **named)
        cache.layers[1].keys[:, :, 0] = 0
        return logits

    model.step = stale


def mlx_other_start(model: Any) -> None:
    model.config = dataclasses.replace(CONFIG, bos_id=5)


def mlx_length_penalty(model: Any) -> None:
    search = model.search
    model.search = lambda ids, **options: search(ids, **options, length_penalty=0.7)


MLX_MUTATIONS = {
    "norm epsilon 1e-6 for 1e-5": (mlx_epsilon, "", "decoder.layers.1.feed_forward", "tapped", ""),
    "one bit of one weight": (mlx_one_bit, "decoder.layers.0.self_attention.key_proj.weight", "", "", ""),
    "dropout left on": (lambda model: model.train(), "", "encoder.layers.0.self_attention", "tapped", ""),
    "stale cache row": (mlx_stale_row, "", "decoder.layers.1.self_attention", "cached, tapped", "greedy"),
    "another start token": (mlx_other_start, "", "", "", "greedy"),
    "another length penalty": (mlx_length_penalty, "", "", "", "beam 4"),
}


@pytest.mark.parametrize("name", MLX_MUTATIONS)
def test_a_bug_in_the_mlx_model_is_found_where_it_is(name: str, exported: tuple[Path, Path]) -> None:
    from mlx_transformer.nn import Transformer

    change, weights, tap, path, search = MLX_MUTATIONS[name]
    checkpoint = open_checkpoint(exported[0])
    model = Transformer.load(exported[0])
    change(model)
    report = compare_engines(checkpoint, [MlxEngine.of(model)], grid(checkpoint.config, SEED))
    assert not report.equal
    wrong = {problem.split(":")[0] for check in report.weights for problem in check.problems}
    assert wrong == ({weights} if weights else set())
    first = report.first_over_budget("mlx")
    assert (first and (first.tap, first.path)) == ((tap, path) if tap else None)
    assert not search or search in {check.search for check in report.tokens if not check.passed}


def test_the_unmutated_model_passes(exported: tuple[Path, Path]) -> None:
    report = compare(*exported, ["mlx"], SEED)
    assert report.equal, report.failures()
