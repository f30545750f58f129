"""Single numbers that operators of the network read as constants, against the architecture, exactly.

A scale that is off by one part in a million, or a mask's -1e9 that is another large number, changes less than float32
rounds. So each of them is one of the few that the architecture has at its place:

    Mul in an attention, or on its way there    1 / sqrt(d_k), or what the config says
    Mul of the embedding and of the logits      sqrt(d_model), the config's scale
    Div and Mul of the logits' bound            the config's cap
    Where of a mask                             0, or what hides a key
    Pow and Add of a norm, Sub of an SSRU       2, its epsilon, 1
    Max of a count, Clip of a vector's length   1, 1e-12

A number that another operator of the network reads is an error: nobody has said here what it has to be. So is an
operator of the network that isn't listed here, since it may change the function without reading a number, as Tanh does.
What lower precisions add is judged by `int8_products.py`, the search around the network by its tokens, and all by
`same_graph.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from export.graph.protos import all_nodes, constants_of, initializers
from export.nn.marks import HIDDEN
from export.precision import half
from export.request import SENTENCE_EMBEDDING
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.text_embedding import SMALLEST_NORM

PLACE = re.compile(r"(?:phases/steps/)?(?:(?P<stack>encoder|decoder)/)?(?:.*/)?(?P<module>[a-z_]+)/[A-Za-z_]+_?\d*$")
UNSCOPED = re.compile(r"(?:phases/steps/)?[A-Za-z_]+_node_\d+$")
LOWERED = re.compile(r"_node_\d+/")
"""In the names of nodes that a lower precision has put in the place of one."""
OF_SEARCH = "phases/"
"""Begins the names of a search's nodes."""
OF_VECTOR = f"{SENTENCE_EMBEDDING}."
"""Begins the names of the weights that make a text's vector, which may be a single number."""
ATTENTION, CAP = ("self_attention", "cross_attention"), "logit_cap"
OWN_KEY = 4 * HIDDEN
"""The bias that hides a key in a search, where a row's own is still seen among those that `HIDDEN` hides."""

OPERATORS = frozenset(
    # Those that move values, or count and compare places:
    "And ArgMax Cast CastLike Concat ConstantOfShape CumSum Equal Expand Flatten Gather GatherElements GatherND Greater"
    " Identity Less LessOrEqual Mod NonZero Not Or Pad Range Reshape Shape Slice Split Squeeze Transpose Unsqueeze"
    " Where"
    # Those that compute:
    " Abs Add Clip Div Gemm LogSoftmax MatMul Max Min Mul Neg Pow ReduceMax ReduceMean ReduceSum Softmax Sqrt Sub TopK"
    " Attention DecoderMaskedMultiHeadAttention FusedMatMul LayerNormalization MultiHeadAttention RMSNormalization"
    # Those with graphs of their own:
    " If Loop".split()
)
"""The operators of a network, whatever its options: what they read is judged here, by the attributes, or by values."""
FUNCTIONS = {"relu": "Relu", "gelu": "Gelu", "gelu_tanh": "Gelu", "silu": "Sigmoid", "tanh": "Tanh"}
"""The operators of activations."""

Found = tuple[str, float, tuple[float, ...]]
"""Name of a node, the number that it reads, those that it may read; none: no rule names such a node."""


def numbers(graph: onnx.GraphProto, folder: Path, config: TransformerConfig) -> Iterator[Found]:
    """Yield every number that operators of the network read, in a graph and in those within it."""
    nodes, parameters = list(all_nodes(graph)), parameter_shapes(config)
    searches = any(node.name.startswith(OF_SEARCH) for node in nodes)
    settings = {entry.name for entry in graph.input}  # of a search, which have a default
    constants = {name: tensor for name, tensor in constants_of(graph).items() if name not in settings}
    for node in nodes:
        allowed = _allowed(node, config)
        if not allowed and not _is_judged(node, searches, parameters):
            continue
        for name in (each for each in node.input if each not in parameters and not each.startswith(OF_VECTOR)):
            array = _single(constants.get(name), folder)
            if array is not None:
                with np.errstate(over="ignore"):  # float16 has no -1e9
                    stored = [float(array.dtype.type(each)) for each in allowed]
                yield node.name or node.op_type, float(array), tuple(each for each in stored if math.isfinite(each))


def unknown_operators(graph: onnx.GraphProto, config: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Yield (name, operator) of each node of the network whose operator has no rule, in a graph and those within it."""
    nodes, parameters = list(all_nodes(graph)), parameter_shapes(config)
    searches = any(node.name.startswith(OF_SEARCH) for node in nodes)
    known = OPERATORS | _functions(config)
    for node in nodes:
        # A text's vector has activations of its own, which its values tell.
        of_vector = f"/{SENTENCE_EMBEDDING}/" in f"/{node.name}" and node.op_type in FUNCTIONS.values()
        if node.op_type not in known and not of_vector and _is_judged(node, searches, parameters):
            yield node.name, node.op_type


def _functions(config: TransformerConfig) -> set[str]:
    """The functions of single numbers that the options of a network ask for."""
    layers = [*config.layers("encoder"), *config.layers("decoder")]
    functions = {FUNCTIONS[c.activation] for c in layers}
    functions |= {FUNCTIONS[config.head.activation]} if config.head.activation is not None else set()
    functions |= {"Sigmoid", "Relu"} if config.recurrent else set()  # an SSRU's gate and output
    return functions | ({"Tanh"} if config.logit_cap is not None else set())


def norm_parameters(graph: onnx.GraphProto, config: TransformerConfig) -> set[str]:
    """Return the weights of norms that a graph holds: each has to have an operator whose epsilon is known."""
    table = parameter_shapes(config)
    return {t.name for t in initializers(graph) if t.name in table and t.name.endswith("norm.weight")}


def _allowed(node: onnx.NodeProto, config: TransformerConfig) -> tuple[float, ...]:
    """Return the numbers that a node may read; () if no rule names it."""
    if UNSCOPED.match(node.name):
        if node.op_type == "Where":
            return 0.0, HIDDEN, half.HIDDEN, OWN_KEY
        factors = (math.sqrt(config.d_model), config.logit_scale or 1.0, *_scales(config, None))
        return {"Mul": factors, "Max": (1.0,)}.get(node.op_type, ())  # Max: of a count
    place = PLACE.match(node.name)
    if place is None:
        return ()
    if place["module"] == SENTENCE_EMBEDDING:
        return {"Clip": (SMALLEST_NORM,), "Max": (1.0,), "Sub": (1.0,)}.get(node.op_type, ())
    if place["module"].endswith("norm"):
        return {"Pow": (2.0,), "Add": (config.norm_epsilon,)}.get(node.op_type, ())
    if place["module"] == CAP:
        cap = (config.logit_cap or 0.0,)
        return {"Div": cap, "Mul": cap}.get(node.op_type, ())
    if place["module"] in ATTENTION:
        hidden = (0.0, HIDDEN, half.HIDDEN)  # of the weights that cpu computes beside its operator
        return {"Mul": _scales(config, place["stack"]), "Sub": (1.0,), "Where": hidden}.get(node.op_type, ())
    if node.op_type in ("Where", "Clip") and place["module"] == "positions":
        return 0.0, HIDDEN, half.HIDDEN
    return ()


def _is_judged(node: onnx.NodeProto, searches: bool, parameters: Container[str]) -> bool:
    """Return whether a number that a node reads has to be known here. A vector's width is in its embedding.json; what
    makes a parameter of integers is compared with it; and a node without a name is none that export writes."""
    if not node.name or LOWERED.search(node.name) or node.name.partition("/")[0] in parameters:
        return False
    if node.op_type in ("Mul", "Div") and f"{SENTENCE_EMBEDDING}/" in node.name:
        return False
    place = PLACE.match(node.name)
    of_network = place is not None and (place["stack"] is not None or place["module"] == CAP)
    return of_network or not searches


def _scales(config: TransformerConfig, stack: Any) -> tuple[float, ...]:
    layers = [c for each in (("encoder", "decoder") if stack is None else (stack,)) for c in config.layers(each)]
    return tuple(1 / math.sqrt(c.d_k) if c.attention_scale is None else c.attention_scale for c in layers)


def _single(tensor: onnx.TensorProto | None, folder: Path) -> np.ndarray | None:
    """Return a constant that is one number with a fraction; None for any other."""
    if tensor is None or math.prod(tensor.dims) != 1:
        return None
    array = numpy_helper.to_array(tensor, str(folder)).reshape(())
    return array if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else None
