"""The attributes of a graph's operators, given beside their inputs, against the architecture, exactly.

Numbers can't tell it: an epsilon that is three times too large changes less than float32's own rounding does, unless
an input's variance happens to be small. So every graph of a package is read, those too that no full pass runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import numpy_helper

from export.graph.protos import all_nodes, constants_of
from export.nn.marks import HIDDEN
from export.request import SENTENCE_EMBEDDING
from mlx_transformer.core.config import TransformerConfig

from .numbers import norm_parameters, numbers, unknown_operators

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
}
"""The value that an operator takes where its node states none."""

Allowed = tuple[float | str, ...]


def expected_attributes(config: TransformerConfig, stack: str = "") -> dict[str, dict[str, Allowed]]:
    """Return {operator: {attribute: what it may be}} of one stack, or of both; numbers as float32 holds them."""
    stacks = [layer for each in STACKS if not stack or each == stack for layer in config.layers(each)] or [config]
    epsilon = _float32(config.norm_epsilon)
    scales = [_float32(c.attention_scale or 1 / math.sqrt(c.d_k)) for c in stacks]
    last: dict[str, Allowed] = {"axis": (-1,)}
    stashed: dict[str, Allowed] = {"stash_type": (onnx.TensorProto.FLOAT,)}
    # The keys may be scaled already; then the operator scales by 1.
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
        "FusedMatMul": {"alpha": _one_of(scales)},
        "Gelu": {"approximate": gelu},
        "Sqrt": {"epsilon": (epsilon,)},
    }


def _one_of(values: Iterable[float | str]) -> Allowed:
    """Return each value once: the stacks have the same, as a rule."""
    return tuple(dict.fromkeys(values))


def attributes(files: Mapping[str, Path], config: TransformerConfig) -> tuple[int, list[str]]:
    """Return (how many were compared, which of them are wrong in words) in all these graphs and the branches in
    them."""
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
    """Return which stack a node was built in, by its name; empty for neither."""
    return next((stack for stack in STACKS if f"{stack}/" in name), "")


def _operators(
    graph: onnx.GraphProto, folder: Path, expected: Mapping[str, Mapping[str, Allowed]]
) -> Iterator[tuple[onnx.NodeProto, dict[str, Any]]]:
    """Yield (node, {attribute: value}) of the operators in `expected`; a root has the epsilon of its RMSNorm. The nodes
    that make a text's vector aren't the architecture's: its numbers are judged."""
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
    """Return c of sqrt(mean(x^2) + c), 0 where nothing is added; None of another root."""
    below = makers.get(root.input[0])
    if below is not None and below.op_type == "ReduceMean":
        return 0.0
    if below is None or below.op_type != "Add":
        return None
    made = [makers.get(name) for name in below.input]
    if not any(node is not None and node.op_type == "ReduceMean" for node in made):
        return None
    tensor = next((constants[name] for name in below.input if name in constants), None)
    return math.nan if tensor is None else float(numpy_helper.to_array(tensor, str(folder)).reshape(-1)[0])


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _float32(value: float) -> float:
    return float(np.float32(value))
