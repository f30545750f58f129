"""The same network on both sides, by its operations: MLX's trace, the ONNX graph, and the architecture.

Numbers can agree by chance where a parameter hardly matters. So every parameter must have a path to the output, there
must be as many matrix products and softmaxes as in the architecture, and operators' attributes, e.g. an epsilon, must
be the architecture's (`attributes.py`). A fused attention counts as its two products and one softmax, a product with a
sum (AddMM, Gemm) as one product. And each graph must be, node by node, the one that export builds from the checkpoint
(`same_graph.py`), so that it has no nodes that test inputs don't happen to reach.

MLX, and the code that builds graphs, are imported inside functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from export.graph.protos import all_nodes, edges_of, inner_graphs, reached
from export.interface import (
    CROSS_ATTENTION,
    DECODER_CPU,
    DECODER_FIRST,
    DECODER_MERGED,
    ENCODER,
    ENCODER_CPU,
    MODEL,
    TEXT_OUTPUTS,
)
from export.precision.packed import A, B
from export.validate.engines.protocol import Engine
from export.validate.engines.stored import OnnxFiles
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import INT8_SCALES, read_int8_scales
from mlx_transformer.core.parameters import output_weight_name, parameter_shapes

from .attributes import attributes
from .int8 import int8_products, left_in_float32

# {operation: (matrix products, softmaxes)}
MLX_COUNTS = {
    "Matmul": (1, 0),
    "AddMM": (1, 0),
    "QuantizedMatmul": (1, 0),
    "Softmax": (0, 1),
    "ScaledDotProductAttention": (2, 1),
}
QUANTISED = ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits")
ONNX_COUNTS = (
    dict.fromkeys(("MatMul", "FusedMatMul", "Gemm", *QUANTISED), (1, 0))
    | {"Softmax": (0, 1)}
    | dict.fromkeys(
        ("Attention", "MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention"), (2, 1)
    )
)
AMONG_CANDIDATES = "/logits.yes/"
"""Part of the names of nodes that a search runs in place of all logits (`search/vocabulary.py`)."""
OF_SAMPLING = 1  # softmaxes of a search that the network doesn't have


@dataclass(frozen=True)
class Structure:
    """The parts of one runtime's graph.

    `expected`: (matrix products, softmaxes) of the architecture. `unused`: parameters without a path to the output.
    `attributes`: how many were compared, in all graphs; `wrong`: the wrong ones, in words.
    """

    runtime: str
    products: int
    softmaxes: int
    expected: tuple[int, int]
    parameters: int
    unused: tuple[str, ...]
    attributes: int = 0
    wrong: tuple[str, ...] = ()
    nodes: int = 0
    """How many nodes were compared with the graphs that export builds; 0 for other exporters' graphs."""

    @property
    def passed(self) -> bool:
        return (self.products, self.softmaxes) == self.expected and not self.unused and not self.wrong

    @property
    def problem(self) -> str:
        """The structure's fault in words; empty if it has none."""
        if self.unused:
            return f"no way to the output from {', '.join(self.unused[:3])}" + (" ..." if len(self.unused) > 3 else "")
        if self.wrong:
            return self.wrong[0] + (f"; and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else "")
        if self.passed:
            return ""
        counts = f"{self.products} matrix products and {self.softmaxes} softmaxes"
        return f"{counts}, the architecture has {self.expected[0]} and {self.expected[1]}"


def expected_counts(config: TransformerConfig) -> tuple[int, int]:
    """Count the matrix products and softmaxes of one full pass, from the table of parameters.

    Each projection is a product, and so is the classifier, tied or not. Each attention (one with queries) is two more
    products and a softmax.
    """
    products = {name for name in parameter_shapes(config) if name.endswith("_proj.weight")}
    attentions = sum(name.endswith(".query_proj.weight") for name in products)
    products |= {output_weight_name(config)} if config.head.classifies else set()
    return len(products) + config.head.per_row + 2 * attentions, attentions  # rows' vectors are a product too


def structures(engines: Iterable[Engine]) -> Iterator[Structure]:
    """Yield the structure of each engine whose operations can be read."""
    same: dict[tuple[Any, ...], tuple[int, list[str]]] = {}  # several runtimes may run the same files
    for engine in engines:
        config, files, nodes = engine.config, engine.capabilities.files, 0
        compared, wrong = attributes(files, config)
        if engine.precision == "int8" and isinstance(engine, OnnxFiles):
            products, problems = int8_products(files, engine.int8_scales)
            left = left_in_float32(files, engine.int8_scales, config)
            compared, wrong = compared + products, [*wrong, *problems, *left, *_differing(engine)]
        if isinstance(engine, OnnxFiles) and files:
            key = tuple(files.items())
            if key not in same:
                from .same_graph import same_graphs

                same[key] = same_graphs(engine)
            nodes, other = same[key]
            told = {_place(problem) for problem in wrong}
            wrong = [*wrong, *(problem for problem in other if _place(problem) not in told)]
        if files:
            operations, used = _of_onnx(engine)
        elif engine.capabilities.isolates == "mlx":
            operations, used = _of_mlx(engine)
        else:
            continue
        needed = [name for name in parameter_shapes(config) if name not in engine.unused_parameters()]
        unused = tuple(name for name in needed if name not in used)
        yield Structure(
            *(engine.name, *operations, expected_counts(config), len(needed), unused, compared, tuple(wrong), nodes)
        )


def _place(problem: str) -> tuple[str, ...]:
    """Return the graph and the node that a problem names."""
    return tuple(problem.split(": ")[:2])


def _differing(engine: OnnxFiles) -> Iterator[str]:
    """Name the products whose fixed scales differ from the checkpoint's own, if the files claim to have these."""
    assert engine.checkpoint is not None
    own, used = read_int8_scales(engine.checkpoint.folder, engine.config), engine.int8_scales
    if own is not None and own.origin == used.origin:
        yield from (
            f"{name}: other scales than {INT8_SCALES} has"
            for name in own.products
            if own.of(name) != used.of(name) and not used.of(name).float32
        )


def _of_mlx(engine: Any) -> tuple[tuple[int, int], set[str]]:
    from mlx.utils import tree_flatten, tree_unflatten

    mx, model = engine.mx, engine.model
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.eval(list(weights.values()))
    ids = [mx.zeros((2, min(3, model.config.max_positions)), mx.int32)]
    ids = ids * (2 if model.config.architecture == "encoder-decoder" else 1)
    records: list[dict[str, Any]] = []

    def network(*inputs: Any, **parameters: Any) -> Any:
        model.update(tree_unflatten(list(parameters.items())))
        return model(*inputs)

    with engine.stream():
        try:
            mx.export_function(records.append, network, *ids, **weights)
        finally:
            model.update(tree_unflatten(list(weights.items())))
    primitives = [record for record in records if record["type"] == "primitive"]
    keywords = next(record["keywords"] for record in records if record["type"] == "keyword_inputs")
    outputs = next(record["outputs"] for record in records if record["type"] == "outputs")
    edges = [([i[0] for i in p["inputs"]], [o[0] for o in p["outputs"]]) for p in primitives]
    read = reached([output[0] for output in outputs], edges)
    products, softmaxes = _count((p["name"] for p in primitives), MLX_COUNTS)
    products -= sum(name.rpartition(".")[2] in (A, B) for name in weights)  # each is multiplied with once
    return (products, softmaxes), {name for name, i in keywords if i in read}


def _of_onnx(engine: Engine) -> tuple[tuple[int, int], set[str]]:
    """Return ((matrix products, softmaxes), parameters used) in the graphs of one full pass."""
    files, searches = engine.capabilities.files, engine.capabilities.shows == "tokens"
    if searches:
        names = list(files)
    elif MODEL in files:
        names = [MODEL]
    elif ENCODER_CPU in files:
        names = [ENCODER_CPU, DECODER_CPU]
    else:
        names = [ENCODER, DECODER_FIRST if DECODER_FIRST in files else DECODER_MERGED]
    total, used = np.zeros(2, int), set()
    for name in names:
        graph = onnx.load(files[name], load_external_data=False).graph
        nodes = [node for node in _network_nodes(graph) if AMONG_CANDIDATES not in f"/{node.name}"]
        total += _count((node.op_type for node in nodes), ONNX_COUNTS)
        total[0] += _beside_others(nodes) - _of_adapters(nodes)
        read = reached([output.name for output in graph.output], edges_of(graph))
        used |= read | {name.rpartition(".")[0] for name in read}  # embedding.weight.int8
    if searches:
        total[1] -= OF_SAMPLING
    return (int(total[0]), int(total[1])), used


def _network_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes of a graph and its inner graphs, without nodes that only compute an optional output:
    `cross_attention` beside a fused attention, or an output for a text (`TEXT_OUTPUTS`)."""
    outputs = [output.name for output in graph.output]
    needed = [name for name in outputs if name not in (CROSS_ATTENTION, *TEXT_OUTPUTS.values())]
    return list(all_nodes(graph)) if needed == outputs else list(_needed_nodes(graph, needed))


def _needed_nodes(graph: onnx.GraphProto, outputs: Iterable[str]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that these outputs depend on, inner graphs included."""
    read = reached(outputs, edges_of(graph))
    for node in graph.node:
        if read & {*node.output}:
            yield node
            for inner in inner_graphs(node):
                needed = _needed_of_loop(node, inner, read) if node.op_type == "Loop" else inner.output
                yield from _needed_nodes(inner, [output.name for output in needed])


def _needed_of_loop(node: onnx.NodeProto, body: onnx.GraphProto, read: set[str]) -> list[onnx.ValueInfoProto]:
    """Return the outputs of a Loop's body that its needed outputs depend on: the condition, their own last values,
    and everything that is carried from step to step for them."""
    edges = list(edges_of(body))
    carried = range(len(node.input) - 2)  # behind the number of steps and the condition
    needed = {0, *(1 + i for i, name in enumerate(node.output) if name in read)}
    while True:
        inside = reached([body.output[i].name for i in needed], edges)
        more = {1 + i for i in carried if body.input[2 + i].name in inside} - needed
        if not more:
            return [body.output[i] for i in sorted(needed)]
        needed |= more


def _count(operations: Iterable[str], table: dict[str, tuple[int, int]]) -> tuple[int, int]:
    counts = Counter(operations)
    products, softmaxes = (sum(counts[name] * each[k] for name, each in table.items()) for k in (0, 1))
    return products, softmaxes


def _beside_others(nodes: list[onnx.NodeProto]) -> int:
    """Count the products that are part of another one, as their integers lie side by side."""
    joined = {node.output[0]: len(node.input) - 1 for node in nodes if node.op_type == "Concat"}
    return sum(joined.get(node.input[1], 0) for node in nodes if node.op_type in QUANTISED)


def _of_adapters(nodes: list[onnx.NodeProto]) -> int:
    """Count the products of adapters beside integer matrices."""
    # A Reshape: a search reads its matrices through one (search/placement.py).
    cast = {node.output[0]: node.input[0] for node in nodes if node.op_type in ("Cast", "Reshape")}
    read = ([cast.get(name, name) for name in node.input] for node in nodes if node.op_type == "MatMul")
    return sum(any(name.rpartition(".")[2] in (A, B) for name in names) for names in read)
