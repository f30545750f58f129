"""Every node, attribute, constant and input of every graph is changed: the comparison names each of them.

What can be changed together is changed together, so that all nodes of a graph are tried; some are tried by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from adapter_models import kept
from combined import SLOW
from onnx import numpy_helper
from quantized_models import wide
from random_models import random_weights
from small_models import DECODER, SIZES, alone, encoder_decoder

from export import export_onnx, export_search
from export.graph.protos import all_nodes, inner_graphs, load_graph
from export.runtime.folder import precisions
from export.validate import compare
from export.validate.checks.same_graph import Comparison, expected_graphs
from export.validate.engines import open_engine
from export.validate.engines.stored import OnnxFiles
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import INT8_SCALES, SIGNED, SYMMETRIC, Int8Scales, ProductScales
from mlx_transformer.core.parameters import parameter_shapes, quantizable_shapes
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.core.text_embedding import Dense, TextEmbedding
from mlx_transformer.system.errors import UserError

ENCODER = {"architecture": "encoder", "decoder_layers": 0}
T5 = TransformerConfig(
    **SIZES, norm_placement="pre", norm="rmsnorm", positions="relative", activation="gelu_tanh", gated=True,
    feed_forward_bias=False, scale_embeddings=False, attention_scale=1.0, logit_scale=0.25, relative_buckets=8,
    relative_distance=9,
)  # fmt: skip
VECTOR = TransformerConfig(**{**SIZES, **ENCODER}, positions="learned", head={"kind": "hidden"})
LABELS = TransformerConfig(
    **{**SIZES, **ENCODER}, positions="rotary", norm_placement="pre", norm_bias=False, first_norm=False,
    layer_pattern=[{}, {"window": 3, "rotary_base": 100.0}],
    head={"kind": "classes", "activation": "gelu", "norm": True, "labels": ["bad", "good"]},
)  # fmt: skip
STUDENT = TransformerConfig(**SIZES, decoder_self_attention="ssru", positions="sinusoidal_halves")
_SIDE = SIZES["d_model"]
POOLED = TextEmbedding(
    pooling=("mean", "cls"),
    dense=(Dense(width=6, bias=False), Dense(width=4, activation="gelu")),
    normalize=True,
    weights={
        "dense.0.weight": np.linspace(-0.2, 0.3, 12 * _SIDE, dtype=np.float32).reshape(6, 2 * _SIDE),
        "dense.1.weight": np.linspace(-0.5, 0.6, 24, dtype=np.float32).reshape(4, 6),
        "dense.1.bias": np.linspace(-0.1, 0.1, 4, dtype=np.float32),
    },
)
NOT_READ = ": a tensor that nothing reads"


def saved(folder: Path, config: TransformerConfig, embedding: TextEmbedding | None = None, fixed: bool = False) -> Path:
    """Write a checkpoint. fixed: int8 has scales of its own, of every kind."""
    weights = random_weights(config, 3)
    texts = {} if embedding is None else embedding.texts()
    if fixed:
        entries = {
            name: ProductScales(
                activation=np.float32(9 + i),
                steps=SIGNED if i % 2 else SYMMETRIC,
                weight=np.float32(127 / np.abs(weights[name]).max()) if i % 3 else None,
            )
            for i, name in enumerate(quantizable_shapes(config))
        }
        texts[INT8_SCALES] = Int8Scales(entries, {"text": "drawn"}).json()
    tensors = {} if embedding is None else embedding.tensors()
    return save_checkpoint(folder / "model", config, weights, texts=texts, tensors=tensors)


def folder_of(config: TransformerConfig, **options: Any) -> Callable[[Path], tuple[Path, Path]]:
    of = {name: options.pop(name) for name in ("embedding", "fixed") if name in options}

    def make(folder: Path) -> tuple[Path, Path]:
        checkpoint = saved(folder, config, **of)
        return checkpoint, export_onnx(checkpoint, folder / "onnx", **options)

    return make


def file_of(config: TransformerConfig, **options: Any) -> Callable[[Path], tuple[Path, Path]]:
    of = {name: options.pop(name) for name in ("embedding", "fixed") if name in options}

    def make(folder: Path) -> tuple[Path, Path]:
        checkpoint = saved(folder, config, **of)
        return checkpoint, export_search(checkpoint, folder / "search.onnx", **options)

    return make


def packed(folder: Path) -> tuple[Path, Path]:
    checkpoint = kept(folder, "dora", Scheme(32, 4))
    return checkpoint, export_onnx(checkpoint, folder / "onnx", precision="packed", target="cpu")


def unpacked(folder: Path) -> tuple[Path, Path]:
    checkpoint = kept(folder, "lora", Scheme(32, 3))
    return checkpoint, export_onnx(checkpoint, folder / "onnx")


def slow(make: Callable[[Path], tuple[Path, Path]], name: str) -> Any:
    return pytest.param(make, marks=SLOW, id=name)


MODELS = [
    pytest.param(folder_of(VECTOR, embedding=POOLED), id="vector of a text"),
    pytest.param(folder_of(encoder_decoder("paper"), precision="int8", fixed=True), id="fixed scales"),
    pytest.param(file_of(STUDENT, target="cpu"), id="student, one file"),
    slow(folder_of(LABELS, target="cpu"), "labels, cpu"),
    slow(folder_of(alone("modern", "decoder")), "decoder"),
    slow(folder_of(VECTOR, embedding=POOLED, target="cpu", precision="int8"), "vector, cpu, int8"),
    slow(folder_of(T5), "T5"),
    slow(folder_of(T5, target="web", precision="int4"), "T5, web, int4"),
    slow(file_of(T5, precision="int8"), "T5, one file, int8"),
    slow(folder_of(STUDENT, target="cpu", precision="int8", fixed=True), "student, cpu, fixed scales"),
    slow(file_of(encoder_decoder("paper"), attention=True, precision="float16"), "one file, attention, float16"),
    slow(folder_of(encoder_decoder("two vocabularies"), attention=True), "two vocabularies, attention"),
    slow(folder_of(encoder_decoder("odd widths"), target="cpu"), "odd widths, cpu"),
    slow(folder_of(encoder_decoder("modern"), target="cuda", precision="float16"), "modern, cuda, float16"),
    slow(folder_of(wide(), precision="int4", target="cpu", activations="int8"), "int4, cpu"),
    slow(folder_of(TransformerConfig(**{**SIZES, **DECODER}), precision="int8-weights"), "decoder, int8-weights"),
    slow(packed, "packed, DoRA"),
    slow(unpacked, "three bits, LoRA"),
]


Pairs = list[tuple[ir.Model, Path, set[str]]]
"""The graph that is expected, the file, and the names of the parameters, of each graph of a model."""


@pytest.fixture(params=MODELS)
def pairs(request: pytest.FixtureRequest, tmp_path: Path) -> Pairs:
    checkpoint, exported = request.param(tmp_path)
    opened = open_checkpoint(checkpoint)
    name = "onnxruntime" if exported.is_file() else f"onnxruntime:cpu:all:{precisions(exported)[0]}"
    engine = open_engine(name, opened, exported, 1)
    assert isinstance(engine, OnnxFiles)
    graphs = dict(expected_graphs(engine))
    assert graphs.keys() == engine.files.keys()
    return [(graph, engine.files[name], {*parameter_shapes(opened.config)}) for name, graph in graphs.items()]


def problems_of(expected: ir.Model, model: onnx.ModelProto) -> list[str]:
    return Comparison(expected, ir.from_proto(model)).problems


def operators(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in all_nodes(graph) if node.op_type != "Constant"]


def every_graph(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for inner in inner_graphs(node):
            yield from every_graph(inner)


def attributes(nodes: list[onnx.NodeProto]) -> list[str]:
    """Another value for each attribute."""
    changed = []
    for node in nodes:
        for attribute in node.attribute:
            kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
            if kind == "FLOAT":
                attribute.f = float(np.nextafter(np.float32(attribute.f), np.float32(9)))
            elif kind == "INT":
                attribute.i += 1
            elif kind == "STRING":
                attribute.s += b"x"
            elif kind == "INTS" and len(attribute.ints):
                attribute.ints[-1] += 1
            else:
                continue
            changed.append(f"{node.name}: {attribute.name} is ")
    return changed


def operator(nodes: list[onnx.NodeProto]) -> list[str]:
    for node in nodes:
        node.op_type = "Min" if node.op_type == "Max" else "Max"
    return [f"{node.name}: operator is" for node in nodes]


def domain(nodes: list[onnx.NodeProto]) -> list[str]:
    for node in nodes:
        node.domain = "some.where"
    return [f"{node.name}: operator is some.where" for node in nodes]


def fewer_inputs(nodes: list[onnx.NodeProto]) -> list[str]:
    changed = [node for node in nodes if len(node.input) > 1 and node.input[-1]]
    for node in changed:
        node.input.pop()
    return [f"{node.name}: reads " for node in changed]


def exchanged(nodes: list[onnx.NodeProto]) -> list[str]:
    pairs = [(node, *node.input[:2]) for node in nodes if len(node.input) > 1]  # two constants may be equal
    changed = [node for node, a, b in pairs if a != b and not (a.startswith("const") and b.startswith("const"))]
    for node in changed:
        node.input[0], node.input[1] = node.input[1], node.input[0]
    return [f"{node.name}: input 0" for node in changed]


def more_outputs(nodes: list[onnx.NodeProto]) -> list[str]:
    for node in nodes:
        node.output.append(f"{node.name}/more")
    return [f"{node.name}: gives " for node in nodes]


def inserted(graph: onnx.GraphProto) -> list[str]:
    """A node behind each value that a node makes; some have a name as if they belonged there."""
    names = []
    for part in every_graph(graph):
        nodes = list(part.node)
        del part.node[:]
        for i, node in enumerate(nodes):
            part.node.append(node)
            for k, value in enumerate([*node.output] if node.op_type != "Constant" else []):
                if not value:
                    continue
                part.node[-1 - k].output[k] = f"{value}_before"
                kind, name = ("Identity", "Clip", "Relu", "Neg")[i % 4], f"{node.name}/{k}" if i % 2 else ""
                part.node.append(onnx.helper.make_node(kind, [f"{value}_before"], [value], name))
                names.append(name or f"{kind} that makes {value}: a node that")
    return names


def removed(graph: onnx.GraphProto) -> list[str]:
    """Every third node is gone: those that read its result read what it read."""
    names = []
    for part in every_graph(graph):
        for node in list(part.node)[::3]:
            if node.op_type not in ("Constant", "Loop", "If", "Scan") and node.input:
                for other in all_nodes(graph):
                    other.input[:] = [node.input[0] if name == node.output[0] else name for name in other.input]
                for each in every_graph(graph):
                    for output in each.output:
                        output.name = node.input[0] if output.name == node.output[0] else output.name
                part.node.remove(node)
                names.append(f"{node.name}: is missing")
    return names


def ports(graph: onnx.GraphProto) -> list[str]:
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    return ["its inputs: ", "its outputs: "]


def further_tensor(graph: onnx.GraphProto) -> list[str]:
    graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "more"))
    return ["more: a tensor that nothing reads"]


def constants(graph: onnx.GraphProto, parameters: set[str]) -> list[str]:
    """Another number in each tensor that is no parameter: of one number the next one that there is."""
    names = []
    for part in every_graph(graph):
        for tensor in part.initializer:
            array = numpy_helper.to_array(tensor).copy()
            if tensor.name in parameters or not array.size:
                continue
            flat = array.reshape(-1)
            if array.dtype.kind == "f" and array.size == 1:
                flat[0] = np.nextafter(flat[0], array.dtype.type(9))
            elif array.dtype.kind in "fiu":
                flat[-1] += array.dtype.type(1)
            elif array.dtype.kind == "b":
                flat[-1] ^= True
            else:
                continue
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
            names.append(tensor.name)
    return names


OF_NODES = (attributes, operator, domain, fewer_inputs, exchanged, more_outputs)
OF_GRAPHS = (inserted, removed, ports, further_tensor)


@pytest.mark.fast("fixed scales", "vector of a text")
def test_each_of_them_is_named(pairs: Pairs) -> None:
    for expected, file, parameters in pairs:
        whole = onnx.load(file)
        assert problems_of(expected, whole) == []
        for change in (*OF_NODES, *OF_GRAPHS):
            model = deepcopy(whole)
            names = change(operators(model.graph)) if change in OF_NODES else change(model.graph)  # type: ignore[arg-type]
            told = problems_of(expected, model)
            unsaid = [name for name in names if not any(problem.startswith(name) for problem in told)]
            assert names, change
            assert not unsaid, (file.name, change, unsaid[:3], told[:3])
        model = deepcopy(whole)
        names = constants(model.graph, parameters)
        told = "\n".join(problems_of(expected, model))
        unsaid = [name for name in names if f" {name} " not in told and f" {name}, " not in told]
        assert not unsaid, (file.name, unsaid[:3])


@pytest.mark.fast("fixed scales-4")
@pytest.mark.parametrize("count", [4, pytest.param(100, marks=SLOW)])
def test_one_of_them_alone_is_named(pairs: Pairs, count: int) -> None:
    random = np.random.default_rng(1)
    for expected, file, _ in pairs:
        whole = onnx.load(file)
        for _ in range(count):
            model = deepcopy(whole)
            nodes = operators(model.graph)
            node, change = nodes[random.integers(len(nodes))], OF_NODES[random.integers(len(OF_NODES))]
            names, told = change([node]), problems_of(expected, model)
            assert all(any(problem.startswith(name) for problem in told) for name in names), (change, names, told)
            others = [each for each in told if not each.startswith(f"{node.name}: ") and NOT_READ not in each]
            assert not others, (node.name, others)


def test_a_file_that_says_the_same_otherwise_is_the_same(tmp_path: Path) -> None:
    """Tensors inside the file, nodes in another order, defaults spelt out, inner values renamed."""
    checkpoint, exported = folder_of(encoder_decoder("paper"))(tmp_path)
    for file in sorted((exported / "onnx").glob("*.onnx")):
        model = onnx.load(file)
        graph = model.graph
        order = sorted(range(len(graph.node)), key=lambda i: -i)
        nodes, made = [graph.node[i] for i in order], {v.name for v in (*graph.input, *graph.initializer)}
        del graph.node[:]
        while nodes:  # the last one that has all it reads
            inside = {name for node in nodes for name in node.output}
            ready = next(n for n in nodes if not (_reads(n) & (inside - made)))
            nodes.remove(ready)
            graph.node.append(ready)
            made |= {*ready.output}
        for node in graph.node:
            if node.op_type == "Softmax" and not node.attribute:
                node.attribute.append(onnx.helper.make_attribute("axis", -1))
            if node.op_type == "MatMul":
                node.doc_string = "a product"
        onnx.save(model, file)
    for data in (exported / "onnx").glob("*.onnx_data"):
        data.unlink()
    (exported / "onnx" / "manifest.json").unlink()
    report = compare(checkpoint, exported, ["onnxruntime"], seed=1, threads=1, searches=False)
    assert report.equal, report.failures()
    assert all(s.nodes > 300 for s in report.structures)


def _reads(node: onnx.NodeProto) -> set[str]:
    return {*node.input}.union(*(name for g in inner_graphs(node) for n in all_nodes(g) for name in [n.input]))


def test_a_name_that_is_no_text_is_said(tmp_path: Path) -> None:
    """protobuf reads it as bytes, over which onnx_ir stumbles."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    known = onnx.helper.make_tensor_value_info("named", onnx.TensorProto.FLOAT, [1])
    nodes = [onnx.helper.make_node("Abs", ["x"], ["named"]), onnx.helper.make_node("Abs", ["named"], ["y"])]
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "graph", [x], [y], value_info=[known]), ir_version=8)
    file = tmp_path / "model.onnx"
    file.write_bytes(model.SerializeToString().replace(b"named", b"\xff\xfeame"))
    with pytest.raises(UserError, match=r"model\.onnx: cannot be read as an ONNX model .*; export it again"):
        load_graph(file)
