"""An exported graph cut at every known point: each operation computes from the reference's values.

The value of a known point becomes an input of the graph, which takes the reference's value, and what the graph computes
there becomes an output. Points are found by the names of nodes (the modules' names) and, within attention, by following
the data around the softmax; a point that can't be found (a graph changed beyond recognition) isn't cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.graph.protos import COMPUTED, Wiring, cut
from export.interface import DECODER_FIRST, DECODER_MERGED, DECODER_NEXT, ENCODER, GRAPHS, MODEL, PARTS, STATE
from export.targets.portable.runtime import positions
from mlx_transformer.core.config import TransformerConfig

from .isolated_inputs import IsolatedInputs

Array = NDArray
AFTER_SOFTMAX = 3
"""The form of Attention's fourth output, `qk_matmul_output`: softmax(Q K^T / sqrt(d_k))."""


def run_onnx(engine: Any, s: IsolatedInputs, path: str, tap: str) -> dict[str, Array]:
    """Return {point: what the graph makes there of the values before it}, in the graph that shows `tap` on `path`."""
    config, case = engine.config, s.case
    if config.architecture != "encoder-decoder":
        name = MODEL
    elif tap.startswith("encoder."):
        name = ENCODER
    elif "merged" in path or DECODER_FIRST not in engine.files:
        name = DECODER_MERGED
    else:
        name = DECODER_FIRST if s.part is None or s.part.start == 0 else DECODER_NEXT
    model = onnx.load(engine.files[name], load_external_data=False)
    points = points_of(model.graph, s.inputs)
    session = engine.open(engine.files[name], cut(model, points))
    ports, values = GRAPHS[name](engine.folder.request), _values(config, s)
    feeds = {value: s.inputs[point] for point, value in points.items()}
    for port in ports.inputs:
        if port.value in values:
            feeds[port.name] = values[port.value]
        elif port.value.startswith(("cache.", "cross.")):  # keys and values or states, before the first pass
            feeds[port.name] = np.zeros(port.without_positions(len(case.ids)), np.float32)
    entries = [entry.name for entry in session.get_inputs()]
    outputs = [point + COMPUTED for point in points]
    arrays = session.run(outputs, {key: np.ascontiguousarray(feeds[key]) for key in entries})
    return dict(zip(points, arrays, strict=True))


def _values(config: TransformerConfig, s: IsolatedInputs) -> dict[str, Array]:
    """Return everything that any of the graphs may want, by value."""
    case, before = s.case, s.before
    real = case.source_mask
    values = {**case.inputs, "source_mask": real}
    if config.architecture == "encoder-decoder":
        assert case.target_ids is not None
        assert s.memory is not None
        values["target_ids"] = case.target_ids if s.part is None else case.target_ids[:, s.part]
        first = 0 if s.part is None else s.part.start
        values["later"], values["positions"] = np.array([first > 0]), positions(values["target_ids"], first)
        values["memory"] = s.memory
    else:
        part = slice(0, case.ids.shape[1]) if s.part is None else s.part
        if s.part is not None and case.prompt_mask is None:
            real = np.ones_like(real)
        values["target_ids"], values["target_mask"] = case.ids[:, part], real[:, : part.stop]
        values["positions"] = np.maximum(np.cumsum(real, axis=1) - 1, 0)[:, part]
    if before is not None:
        own = [STATE] if config.recurrent else PARTS
        for i, pair in enumerate(zip(before.self_attention, before.cross, strict=True)):
            for value, parts, arrays in zip(("cache", "cross"), (own, PARTS), pair, strict=True):
                values |= {f"{value}.{i}.{part}": x for part, x in zip(parts, arrays or (), strict=False)}
    return {value: x.astype(np.float32) if x.dtype == np.float64 else x for value, x in values.items()}


def show_weights(graph: onnx.GraphProto) -> None:
    """Let the operators that keep their attention weights to themselves give them, as the points NAME.weights."""
    for node in graph.node:
        if node.op_type == "Attention" and len(node.output) == 1:
            node.output.extend(["", "", f"{node.name.rpartition('/')[0].replace('/', '.')}.weights"])
            node.attribute.append(onnx.helper.make_attribute("qk_matmul_output_mode", AFTER_SOFTMAX))


def points_of(graph: onnx.GraphProto, names: Iterable[str]) -> dict[str, str]:
    """Return {point: value} of those of the reference's points (in its order) that the graph shows, each value once."""
    wiring = Wiring(graph)
    values: dict[str, str] = {}
    used: set[str] = set()
    for point in names:
        value = point if point in wiring.maker else _value(wiring, point)
        if value is not None and value in wiring.maker and value not in used:
            values[point] = value
            used.add(value)
    return values


def _value(wiring: Wiring, point: str) -> str | None:
    place, _, last = point.rpartition(".")
    scope = point.replace(".", "/").replace("layers/", "layers.")
    if last.endswith(("_proj", "norm")):
        return wiring.last(scope)
    if last == "residual":
        layer = scope.rsplit("/", 2)[0]
        sums = [n.output[0] for n in wiring.readers(place) if n.op_type == "Add" and n.name.startswith(f"{layer}/Add")]
        return sums[0] if sums else None
    if place.endswith(".embedding"):
        return _embedding(wiring, place, last)
    module = scope.rpartition("/")[0]
    if last in ("inner", "context"):
        product = wiring.first(f"{module}/{'down' if last == 'inner' else 'output'}_proj", "MatMul")
        return None if product is None else product.input[0]
    if last == "states":
        rectified = wiring.maker.get(place)
        return rectified.input[0] if rectified is not None and rectified.op_type == "Relu" else None
    if last == STATE:
        layer = place.split(".")[2]
        return next((name for name in wiring.maker if name.endswith(f".{layer}.decoder.{STATE}")), None)
    return dict(_attention(wiring, module)).get(last)


def _embedding(wiring: Wiring, tap: str, last: str) -> str | None:
    """Walk back from the tap to the gathered rows of the table."""
    path = [tap]
    while (node := wiring.maker.get(path[-1])) is not None and node.op_type in ("Add", "Mul"):
        path.append(node.input[0])
    for after, value in pairwise(path[::-1]):
        if wiring.maker.get(after) is not None and wiring.maker[after].op_type == "Gather":
            return after if last == "rows" else value if wiring.maker[value].op_type == "Mul" else None
    return None


def _attention(wiring: Wiring, module: str) -> Iterator[tuple[str, str]]:
    softmax = wiring.first(module, "Softmax")
    if softmax is None:
        return
    yield "weights", softmax.output[0]
    masked = wiring.maker.get(softmax.input[0])
    scores = masked.input[0] if masked is not None and masked.op_type == "Add" else softmax.input[0]
    yield "scores", scores
    product = wiring.maker.get(wiring.behind(scores, "Reshape"))
    if product is not None and product.op_type == "MatMul":
        scaled = wiring.behind(product.input[0], "Reshape")
        yield "queries", wiring.behind(scaled, "Mul")  # by 1 / sqrt(d_k): what else multiplies belongs to the queries
        transposed = wiring.maker.get(product.input[1])
        if transposed is not None and transposed.op_type == "Transpose":
            yield "keys", transposed.input[0]
    readers = wiring.readers(softmax.output[0])
    if readers and readers[0].op_type == "Reshape":
        readers = wiring.readers(readers[0].output[0])
    if readers and readers[0].op_type == "MatMul":
        yield "values", readers[0].input[1]
