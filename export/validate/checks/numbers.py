"""Single numbers that operators of the network read as constants, against the architecture, exactly.

A scale that is off by one part in a million, or a mask's -1e9 that is another large number, changes less than float32
rounds. So each of them is one of the few that the architecture has at its place:

    Mul in an attention, or on its way there    1 / sqrt(d_k), or what the config says
    Mul of the embedding and of the logits      sqrt(d_model), the config's scale
    Where of a mask                             0, or what hides a key
    Pow of a norm, Sub of an SSRU               2, 1
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from export.graph.protos import all_nodes, constants_of, initializers
from export.nn.marks import HIDDEN
from export.precision import half
from export.targets.coreml import shape as coreml
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes

OPERATORS = ("Mul", "Where", "Pow", "Sub")
PLACE = re.compile(r"(?:phases/steps/)?(?:(?P<stack>encoder|decoder)/)?(?:.*/)?(?P<module>[a-z_]+)/[A-Za-z_]+_?\d*$")
UNSCOPED = re.compile(r"(?:phases/steps/)?[A-Za-z_]+_node_\d+$")
ATTENTION = ("self_attention", "cross_attention")
OWN_KEY = 4 * HIDDEN
"""The bias that hides a key in a search, where a row's own is still seen among those that `HIDDEN` hides."""

Found = tuple[str, float, tuple[float, ...]]
"""Name of a node, the number that it reads, those that it may read."""


def numbers(graph: onnx.GraphProto, folder: Path, config: TransformerConfig) -> Iterator[Found]:
    """Yield every number that is known of by its place, in a graph and in those within it."""
    settings = {entry.name for entry in graph.input}  # of a search, which have a default
    constants = {name: tensor for name, tensor in constants_of(graph).items() if name not in settings}
    for node in (each for each in all_nodes(graph) if each.op_type in OPERATORS):
        allowed = _allowed(node, config)
        for name in node.input if allowed else ():
            array = _single(constants.get(name), folder)
            if array is not None:
                with np.errstate(over="ignore"):  # float16 has no -1e9
                    stored = [float(array.dtype.type(each)) for each in allowed]
                yield node.name or node.op_type, float(array), tuple(each for each in stored if math.isfinite(each))


def norm_parameters(graph: onnx.GraphProto, config: TransformerConfig) -> set[str]:
    """Return the weights of norms that a graph holds: each has to have an operator whose epsilon is known."""
    table = parameter_shapes(config)
    return {t.name for t in initializers(graph) if t.name in table and t.name.endswith("norm.weight")}


def _allowed(node: onnx.NodeProto, config: TransformerConfig) -> tuple[float, ...]:
    """Return the numbers that a node may read; none for one of which nothing is known."""
    if UNSCOPED.match(node.name):
        if node.op_type == "Where":
            return 0.0, HIDDEN, half.HIDDEN, OWN_KEY
        scales = _scales(config, None)
        factors = (math.sqrt(config.d_model), config.logit_scale or 1.0, coreml.HIDDEN, *scales)
        return factors if node.op_type == "Mul" else ()
    place = PLACE.match(node.name)
    if place is None:
        return ()
    if place["module"] in ATTENTION:
        return {"Mul": _scales(config, place["stack"]), "Sub": (1.0,)}.get(node.op_type, ())
    if node.op_type == "Where" and place["module"] == "positions":
        return 0.0, HIDDEN, half.HIDDEN, coreml.HIDDEN
    return (2.0,) if node.op_type == "Pow" and place["module"].endswith("norm") else ()


def _scales(config: TransformerConfig, stack: Any) -> tuple[float, ...]:
    layers = [c for each in (("encoder", "decoder") if stack is None else (stack,)) for c in config.layers(each)]
    return tuple(1 / math.sqrt(c.d_k) if c.attention_scale is None else c.attention_scale for c in layers)


def _single(tensor: onnx.TensorProto | None, folder: Path) -> np.ndarray | None:
    """Return a constant that is one number with a fraction; None for any other."""
    if tensor is None or math.prod(tensor.dims) != 1:
        return None
    array = numpy_helper.to_array(tensor, str(folder)).reshape(())
    return array if array.dtype.kind == "f" or array.dtype.name == "bfloat16" else None
