"""Check the attributes and constants of a graph's operators against the architecture, exactly.

Comparing tensors can't find a wrong constant. An epsilon three times too large, a scale off by a part in a million, or
another large number for a mask's -1e9 changes results less than float32's rounding. (A wrong epsilon shows if an
input's variance happens to be small.) So every graph of a package is read, also graphs outside the full pass. These
constants are allowed:

    Mul of a sub-layer's output                 the config's residual scale
    Mul in an attention, or on its way there    1 / sqrt(d_k), or the config's scale
    Mul of the embedding and of the logits      sqrt(d_model), the config's scales
    Div and Mul of a bound                      the config's caps of scores and logits
    Where of a mask                             0, or the number that hides a key
    Pow and Add of a norm, Sub of an SSRU       2, its epsilon, 1
    Max of a count, Clip of a vector's length   1, 1e-12

A constant of another operator of the network is an error, as no rule here gives its value. An operator not listed here
is an error too: it may change the function without any constant, e.g. Tanh. `int8.py` judges the operators of lower
precisions, `same_graph.py` all nodes, and a search is judged by its tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from export.graph.protos import all_nodes, array_of, constants_of, initializers
from export.interface import SENTENCE_EMBEDDING
from export.nn.marks import HIDDEN
from export.precision import half
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.text_embedding import SMALLEST_NORM

NORMS = (
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
)
ATTENTIONS = ("MultiHeadAttention", "DecoderMaskedMultiHeadAttention")
STACKS: tuple[Literal["encoder", "decoder"], ...] = ("encoder", "decoder")
ABSENT = {
    "epsilon": 1e-5,
    "axis": -1,
    "approximate": "none",
    "alpha": 1.0,
    "mask_filter_value": -1e4,
    "unidirectional": 0,
    "is_causal": 0,
    "softcap": 0.0,
    "stash_type": 1,
    "local_window_size": -1,
    "do_rotary": 0,
    "rotary_interleaved": 0,
    "smooth_softmax": 0,
}
"""Operators' defaults, for nodes without the attribute."""

Allowed = tuple[float | str, ...]


def expected_attributes(config: TransformerConfig, stack: str = "") -> dict[str, dict[str, Allowed]]:
    """Return {operator: {attribute: allowed values}} of a stack ("": both stacks), with numbers rounded to float32.

    E.g. {"Softmax": {"axis": (-1,)}, ...}.
    """
    stacks = [layer for each in STACKS if not stack or each == stack for layer in config.layers(each)] or [config]
    epsilon = _float32(config.norm_epsilon)
    scales = [_float32(c.attention_scale or 1 / math.sqrt(c.d_k)) for c in stacks]
    last: dict[str, Allowed] = {"axis": (-1,)}
    stashed: dict[str, Allowed] = {"stash_type": (onnx.TensorProto.FLOAT,)}
    # 1.0: for keys scaled before the operator.
    attention: dict[str, Allowed] = {
        "num_heads": _one_of(c.heads for c in stacks),
        "scale": _one_of([*scales, 1.0]),
        "mask_filter_value": (_float32(HIDDEN),),
        "unidirectional": (0,),
    }
    forms = {"gelu": "none", "gelu_tanh": "tanh"}
    used = [*(c.activation for c in stacks), stacks[0].head.activation]
    gelu = _one_of(forms[name] for name in used if name in forms)
    return {
        **{name: {"epsilon": (epsilon,), **({} if "Skip" in name else last | stashed)} for name in NORMS},
        **dict.fromkeys(("Softmax", "LogSoftmax"), last),
        **dict.fromkeys(ATTENTIONS, attention),
        "Attention": {
            "q_num_heads": attention["num_heads"],
            "kv_num_heads": _one_of(c.key_value_heads for c in stacks),
            "scale": _one_of(scales),
            "is_causal": (0,),
            "softcap": (0.0,),
        },
        "GroupQueryAttention": {
            "num_heads": attention["num_heads"],
            "kv_num_heads": _one_of(c.key_value_heads for c in stacks),
            "scale": _one_of(scales),
            "local_window_size": _one_of(c.window or -1 for c in stacks),
            "softcap": _one_of(_float32(c.score_cap or 0.0) for c in stacks),
            "do_rotary": (*_one_of(int(c.positions == "rotary") for c in stacks), 0),
            "rotary_interleaved": (0,),
            "smooth_softmax": (0,),
        },
        "FusedMatMul": {"alpha": _one_of(scales)},
        "Gelu": {"approximate": gelu},
        "Sqrt": {"epsilon": (epsilon,)},
    }


def _one_of(values: Iterable[float | str]) -> Allowed:
    """Remove duplicates; usually both stacks have the same value."""
    return tuple(dict.fromkeys(values))


def attributes(files: Mapping[str, Path], config: TransformerConfig) -> tuple[int, list[str]]:
    """Check all attributes in these graphs, inner graphs included: (number of attributes, problems in words)."""
    count, wrong = 0, []
    tables = {stack: expected_attributes(config, stack) for stack in (*STACKS, "")}

    def compared(place: str, what: str, value: Any, allowed: Sequence[float | str]) -> None:
        nonlocal count
        count += 1
        if value not in allowed:
            should = " or ".join(map(str, dict.fromkeys(allowed)))
            wrong.append(f"{place}: {what} is {value}, {f'has to be {should}' if should else 'which no rule names'}")

    for name, path in files.items():
        graph = onnx.load(path, load_external_data=False).graph
        norms = 0
        for node, values in _operators(graph, path.parent, tables[""]):
            norms += "epsilon" in values
            for attribute, value in values.items():
                allowed = tables[_stack(node.name)][node.op_type][attribute]
                compared(f"{name}: {node.name or node.op_type}", attribute, value, allowed)
        for node_name, value, allowed in numbers(graph, path.parent, config):
            compared(f"{name}: {node_name}", "its constant", value, allowed)
        wrong += [
            f"{name}: {node}: operator {kind}, which no rule names" for node, kind in unknown_operators(graph, config)
        ]
        if norms < (parameters := len(norm_parameters(graph, config))):
            wrong.append(f"{name}: {norms} norms whose epsilon can be read, of {parameters}")
    return count, wrong


def _stack(name: str) -> str:
    """Return the stack in a node's name; "" for neither."""
    return next((stack for stack in STACKS if f"{stack}/" in name), "")


def _operators(
    graph: onnx.GraphProto, folder: Path, expected: Mapping[str, Mapping[str, Allowed]]
) -> Iterator[tuple[onnx.NodeProto, dict[str, Any]]]:
    """Yield (node, {attribute: value}) for the operators in `expected`.

    A square root is given its RMSNorm's epsilon as an attribute. Nodes for a text's vector don't belong to the
    architecture: only their constants are checked (`numbers`).
    """
    nodes = [node for node in all_nodes(graph) if f"/{SENTENCE_EMBEDDING}/" not in f"/{node.name}"]
    makers = {output: node for node in nodes for output in node.output}
    constants = constants_of(graph)
    for node in nodes:
        own = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Sqrt":
            if (value := _added_to_mean(node, makers, constants, folder)) is not None:
                yield node, {"epsilon": value}
        elif node.op_type in expected:
            yield node, {name: _plain(own.get(name, ABSENT.get(name))) for name in expected[node.op_type]}


def _added_to_mean(
    root: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], constants: Mapping[str, onnx.TensorProto], folder: Path
) -> float | None:
    """Return c in sqrt(mean(x^2) + c), 0 if nothing is added, NaN if c isn't constant; None for other square roots."""
    below = makers.get(root.input[0])
    if below is not None and below.op_type == "ReduceMean":
        return 0.0
    if below is None or below.op_type != "Add":
        return None
    made = [makers.get(name) for name in below.input]
    if not any(node is not None and node.op_type == "ReduceMean" for node in made):
        return None
    tensor = next((constants[name] for name in below.input if name in constants), None)
    return math.nan if tensor is None else float(array_of(tensor, folder).reshape(-1)[0])


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _float32(value: float) -> float:
    return float(np.float32(value))


PLACE = re.compile(r"(?:phases/steps/)?(?:(?P<stack>encoder|decoder)/)?(?:.*/)?(?P<module>[a-z_]+)/[A-Za-z_]+_?\d*$")
SCALES_SUBLAYER = re.compile(r"(?:phases/steps/)?(?:encoder|decoder)/layers\.\d+/Mul_[a-z_]*\d*$")
UNSCOPED = re.compile(r"(?:phases/steps/)?[A-Za-z_]+_node_\d+$")
LOWERED = re.compile(r"_node_\d+/")
"""In the names of nodes that replace another node in a lower precision."""
OF_SEARCH = "phases/"
"""Prefix of a search's node names."""
OF_VECTOR = f"{SENTENCE_EMBEDDING}."
"""Prefix of the names of weights for a text's vector; such a weight may be a single number."""
ATTENTION, CAP = ("self_attention", "cross_attention"), "logit_cap"
OWN_KEY = 4 * HIDDEN
"""A search's bias on hidden keys, if a row's own key must stay visible among keys with the bias `HIDDEN`."""

OPERATORS = frozenset(
    # Move values, or count and compare places:
    "And ArgMax Cast CastLike Concat ConstantOfShape CumSum Equal Expand Flatten Gather GatherElements GatherND Greater"
    " Identity Less LessOrEqual Mod NonZero Not Or Pad Range Reshape Shape Slice Split Squeeze Transpose Unsqueeze"
    " Where"
    # Compute:
    " Abs Add Clip Div Gemm LogSoftmax MatMul Max Min Mul Neg Pow ReduceMax ReduceMean ReduceSum Softmax Sqrt Sub TopK"
    " Attention DecoderMaskedMultiHeadAttention FusedMatMul GroupQueryAttention LayerNormalization"
    " MultiHeadAttention RMSNormalization"
    # Contain graphs:
    " If Loop".split()
)
"""Operators allowed in any network. Constants, attributes or values judge their inputs."""
FUNCTIONS = {"relu": "Relu", "gelu": "Gelu", "gelu_tanh": "Gelu", "silu": "Sigmoid", "tanh": "Tanh"}
"""The operator of each activation."""

Found = tuple[str, float, tuple[float, ...]]
"""(node, constant, allowed constants); no constant is allowed if no rule knows the node."""


def numbers(graph: onnx.GraphProto, folder: Path, config: TransformerConfig) -> Iterator[Found]:
    """Yield each constant (a single float) of the network's operators, in a graph and its inner graphs."""
    nodes, parameters = list(all_nodes(graph)), parameter_shapes(config)
    searches = any(node.name.startswith(OF_SEARCH) for node in nodes)
    settings = {entry.name for entry in graph.input}  # a search's options, stored as inputs with defaults
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
    """Yield (name, operator) of the network's nodes without a rule, in a graph and its inner graphs."""
    nodes, parameters = list(all_nodes(graph)), parameter_shapes(config)
    searches = any(node.name.startswith(OF_SEARCH) for node in nodes)
    known = OPERATORS | _functions(config)
    for node in nodes:
        # A text's vector has its own activations; comparing the vectors judges them.
        of_vector = f"/{SENTENCE_EMBEDDING}/" in f"/{node.name}" and node.op_type in FUNCTIONS.values()
        if node.op_type not in known and not of_vector and _is_judged(node, searches, parameters):
            yield node.name, node.op_type


def _functions(config: TransformerConfig) -> set[str]:
    """Operators for this config's elementwise functions."""
    layers = [*config.layers("encoder"), *config.layers("decoder")]
    functions = {FUNCTIONS[c.activation] for c in layers}
    functions |= {FUNCTIONS[config.head.activation]} if config.head.activation is not None else set()
    functions |= {"Sigmoid", "Relu"} if config.recurrent else set()  # an SSRU's gate and output
    capped = config.logit_cap is not None or any(c.score_cap is not None for c in layers)
    return functions | ({"Tanh"} if capped else set())


def norm_parameters(graph: onnx.GraphProto, config: TransformerConfig) -> set[str]:
    """Names of the norm weights in a graph. Each needs an operator with a readable epsilon."""
    table = parameter_shapes(config)
    return {t.name for t in initializers(graph) if t.name in table and t.name.endswith("norm.weight")}


def _allowed(node: onnx.NodeProto, config: TransformerConfig) -> tuple[float, ...]:
    """The allowed constants of a node; empty if no rule knows it."""
    if UNSCOPED.match(node.name):
        if node.op_type == "Where":
            return 0.0, HIDDEN, half.HIDDEN, OWN_KEY
        factors = (config.embedding_factor, config.logit_scale or 1.0, *_scales(config, None))
        return {"Mul": factors, "Max": (1.0,)}.get(node.op_type, ())  # Max: at least 1 token
    if SCALES_SUBLAYER.match(node.name) and config.residual_scale is not None:
        return (config.residual_scale,)
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
    if place["module"] == "score_cap":
        stack: Any = place["stack"]
        caps = tuple(c.score_cap for c in config.layers(stack) if c.score_cap is not None)
        return {"Div": caps, "Mul": caps}.get(node.op_type, ())
    if place["module"] in ATTENTION:
        hidden = (
            0.0,
            HIDDEN,
            half.HIDDEN,
        )  # masks of `cross_attention`, which target cpu computes beside the fused operator
        return {"Mul": _scales(config, place["stack"]), "Sub": (1.0,), "Where": hidden}.get(node.op_type, ())
    if node.op_type in ("Where", "Clip") and place["module"] == "positions":
        return 0.0, HIDDEN, half.HIDDEN
    return ()


def _is_judged(node: onnx.NodeProto, searches: bool, parameters: Container[str]) -> bool:
    """Return whether a rule must know a node's constants.

    No rule is needed for a vector's length (embedding.json has it) and for operators that unpack a parameter from
    integers. A node without a name isn't from our export; `same_graph.py` reports it.
    """
    if not node.name or LOWERED.search(node.name) or node.name.partition("/")[0] in parameters:
        return False
    if node.op_type in ("Mul", "Div") and f"{SENTENCE_EMBEDDING}/" in node.name:
        return False
    place = PLACE.match(node.name)
    of_network = place is not None and (place["stack"] is not None or place["module"] == CAP)
    return of_network or SCALES_SUBLAYER.match(node.name) is not None or not searches


def _scales(config: TransformerConfig, stack: Any) -> tuple[float, ...]:
    layers = [c for each in (("encoder", "decoder") if stack is None else (stack,)) for c in config.layers(each)]
    return tuple(1 / math.sqrt(c.d_k) if c.attention_scale is None else c.attention_scale for c in layers)


def _single(tensor: onnx.TensorProto | None, folder: Path) -> np.ndarray | None:
    """Return a constant if it is a single float, else None."""
    if tensor is None or math.prod(tensor.dims) != 1:
        return None
    array = array_of(tensor, folder).reshape(())
    return array if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else None
