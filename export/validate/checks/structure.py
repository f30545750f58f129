"""Check the operations of MLX's trace and of the ONNX graphs against the architecture.

Numbers can agree by chance if a parameter hardly matters. So every parameter must have a path to the output. The
numbers of matrix products and softmaxes must be the architecture's, and so must operators' attributes, e.g. an epsilon
(`attributes.py`). A fused attention counts as two products and a softmax, a product with a sum (AddMM, Gemm) as a
single product. Each graph must also equal, node by node, a graph newly built from the checkpoint (`same_graph.py`):
test inputs may not reach every node.

MLX and the code that builds graphs are imported inside functions.
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
    STEP_CPU,
    TEXT_OUTPUTS,
)
from export.precision.packed import REST, SUMS, A, B
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
"""Part of the names of nodes that a search with a shortlist runs instead of the classifier (`search.options`)."""
OF_SAMPLING = 1  # softmaxes of a search, beyond the network's


@dataclass(frozen=True)
class Structure:
    """The operations of a runtime's graph.

    `expected`: (matrix products, softmaxes) of the architecture. `unused`: parameters without a path to the output.
    `attributes`: how many were compared, in all graphs. `wrong`: every difference found, in words.
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
    """How many nodes were compared with newly built graphs; 0 for another exporter's graphs."""

    @property
    def passed(self) -> bool:
        return (self.products, self.softmaxes) == self.expected and not self.unused and not self.wrong

    @property
    def problem(self) -> str:
        """The first differences in words; "" if there are none."""
        if self.unused:
            return f"no way to the output from {', '.join(self.unused[:3])}" + (" ..." if len(self.unused) > 3 else "")
        if self.wrong:
            return self.wrong[0] + (f"; and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else "")
        if self.passed:
            return ""
        counts = f"{self.products} matrix products and {self.softmaxes} softmaxes"
        return f"{counts}, the architecture has {self.expected[0]} and {self.expected[1]}"


def expected_counts(config: TransformerConfig) -> tuple[int, int]:
    """Count (matrix products, softmaxes) of a full pass, from the table of parameters.

    Each projection is a product, and so is the classifier, tied or not. Each attention with queries (an SSRU has none)
    adds two products and a softmax.
    """
    products = {name for name in parameter_shapes(config) if name.endswith("_proj.weight")}
    attentions = sum(name.endswith(".query_proj.weight") for name in products)
    products |= {output_weight_name(config)} if config.head.classifies else set()
    return len(products) + config.head.per_row + 2 * attentions, attentions  # pooling is a product, too


def _of_prompts(config: TransformerConfig) -> tuple[int, int]:
    """Count (matrix products, softmaxes) of reading a prompt: all layers, but only the last one's keys and values."""
    products, attentions = expected_counts(config)
    last = f"decoder.layers.{config.decoder_layers - 1}."
    unread = [name for name in parameter_shapes(config) if name.startswith(last) and name.endswith("_proj.weight")]
    unread = [name for name in unread if not name.endswith((".key_proj.weight", ".value_proj.weight"))]
    return products - config.head.classifies - len(unread) - 2, attentions - 1


def structures(engines: Iterable[Engine]) -> Iterator[Structure]:
    """Yield the structure of each engine with readable operations: ONNX files, or MLX."""
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
        expected = expected_counts(config)
        if engine.capabilities.shows == "tokens" and not config.has_encoder:
            expected = (expected[0] + (prompt := _of_prompts(config))[0], expected[1] + prompt[1])
        needed = [name for name in parameter_shapes(config) if name not in engine.unused_parameters()]
        unused = tuple(name for name in needed if name not in used)
        yield Structure(*(engine.name, *operations, expected, len(needed), unused, compared, tuple(wrong), nodes))


def _place(problem: str) -> tuple[str, ...]:
    """Return the graph and the node in a problem's text."""
    return tuple(problem.split(": ")[:2])


def _differing(engine: OnnxFiles) -> Iterator[str]:
    """Report products whose fixed scales differ from the checkpoint's, if both have the same origin."""
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
    products -= sum(name.rpartition(".")[2] in (A, B) for name in weights)  # an adapter's A and B: a product each
    return (products, softmaxes), {name for name, i in keywords if i in read}


def _of_onnx(engine: Engine) -> tuple[tuple[int, int], set[str]]:
    """Return ((matrix products, softmaxes), names of used parameters) for the graphs of a full pass."""
    files, searches = engine.capabilities.files, engine.capabilities.shows == "tokens"
    if searches:
        names = list(files)
    elif MODEL in files:
        names = [MODEL]
    elif ENCODER_CPU in files:
        names = [ENCODER_CPU, DECODER_CPU]
    elif STEP_CPU in files:
        names = [STEP_CPU]
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
    """Return the nodes of a graph and its inner graphs, without the nodes that only optional outputs need.

    Optional are `cross_attention` beside a fused attention, and a text's outputs (`TEXT_OUTPUTS`).
    """
    outputs = [output.name for output in graph.output]
    needed = [name for name in outputs if name not in (CROSS_ATTENTION, *TEXT_OUTPUTS.values())]
    return list(all_nodes(graph)) if needed == outputs else list(_needed_nodes(graph, needed))


def _needed_nodes(graph: onnx.GraphProto, outputs: Iterable[str]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes behind these outputs, inner graphs included."""
    read = reached(outputs, edges_of(graph))
    for node in graph.node:
        if read & {*node.output}:
            yield node
            for inner in inner_graphs(node):
                needed = _needed_of_loop(node, inner, read) if node.op_type == "Loop" else inner.output
                yield from _needed_nodes(inner, [output.name for output in needed])


def _needed_of_loop(node: onnx.NodeProto, body: onnx.GraphProto, read: set[str]) -> list[onnx.ValueInfoProto]:
    """Return the outputs of a Loop's body behind the Loop's outputs in `read`.

    These are the condition, the outputs' own last values, and every carried value they depend on.
    """
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
    """Count products merged into another product, as their matrices are concatenated."""
    joined = {node.output[0]: len(node.input) - 1 for node in nodes if node.op_type == "Concat"}
    return sum(joined.get(node.input[1], 0) for node in nodes if node.op_type in ("Gemm", *QUANTISED))


def _of_adapters(nodes: list[onnx.NodeProto]) -> int:
    """Count the extra products of adapters, and of biases that whole zero points don't express (`packed.REST`)."""
    # A search reads its matrices through a Reshape (search/write.py), a decoder's attention three side by side.
    cast = {node.output[0]: node.input[0] for node in nodes if node.op_type in ("Cast", "Concat", "Reshape")}
    read = ([cast.get(name, name) for name in node.input] for node in nodes if node.op_type == "MatMul")
    beside = (A, B, REST)
    return sum(any(name.rpartition(".")[2] in beside or name.startswith(SUMS) for name in names) for names in read)
