"""The loop that every kind of search shares, as one standard `Loop`: run the decoder one step, choose tokens, until all
sentences are finished. `generation/steps.py` is the same on the host.

Shapes: B sentences, K hypotheses of a sentence, h those before a step (1 before the first, then K), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from ..primitives import Op


@dataclass(frozen=True)
class Carried:
    """What one iteration hands to the next: its value before the first, and axes (a name: may grow or differ)."""

    start: ir.Value
    dtype: ir.DataType
    axes: tuple[str | int, ...]


State = dict[str, ir.Value]
"""The carried values within the loop's body, by name."""


class Decoder(Protocol):
    """A batch in decoding, of whatever operators. What it reads of the source comes from outside the loop."""

    def initial(self, op: Op) -> dict[str, Carried]:
        """The caches before the first token, outside the loop."""
        ...

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State]:
        """Last tokens (B, h), number t (scalar) of them -> logits (B, h, V) of the next ones, the caches after it."""
        ...

    def reorder(self, op: Op, state: State, parents: ir.Value) -> State:
        """Hypothesis k of a sentence goes on from its hypothesis parents[:, k]; (B, K), each 0 to h - 1."""
        ...


class Strategy(Protocol):
    """How the next tokens are chosen, and what is known of each sentence."""

    steps: ir.Value
    """Most steps (scalar)."""

    def initial(self, op: Op) -> dict[str, Carried]:
        """`ids` (B, 1), the start tokens, `open` (B,), true until a sentence is finished, and what else it needs."""
        ...

    def choose(self, op: Op, logits: ir.Value, state: State, t: ir.Value) -> tuple[State, ir.Value, ir.Value]:
        """Logits (B, h, V) of new token number t -> the state with the new `ids` (B, K), parents (B, K), and what to
        write down for the end (B, K)."""
        ...


def run(op: Op, decoder: Decoder, strategy: Strategy) -> tuple[State, ir.Value]:
    """Decode to the end: the state after the last step, and what was written down at each (T, B, K).

    t ------------------------+-------------+
    ids, caches --> decoder.step --> logits --> strategy.choose --> ids, parents --> decoder.reorder --> caches
    scores, ends, open -------------------------^   |   \\--> open: any sentence left? -> next iteration
                                                    \\--> written down (B, K): the Loop stacks them (T, B, K)
    """
    kept, caches = strategy.initial(op), decoder.initial(op)
    carried: Mapping[str, Carried] = {**kept, **caches}

    def body(op: Op, t: ir.Value, _: ir.Value, *values: ir.Value) -> list[ir.Value]:
        op.builder.push_module("search", "Search")
        state = dict(zip(carried, values, strict=True))
        logits, decoded = decoder.step(op, state["ids"], {name: state[name] for name in caches}, t)
        chosen, parents, written = strategy.choose(op, logits, {name: state[name] for name in kept}, t)
        decoded = decoder.reorder(op, decoded, parents)
        after = {**chosen, **decoded}
        left = op.ReduceMax(op.Cast(after["open"], to=ir.DataType.INT32), keepdims=0)
        op.builder.pop_module()
        return [op.Cast(left, to=ir.DataType.BOOL), *(after[name] for name in carried), written]

    placeholders = [
        _value("search.t", ir.DataType.INT64),
        _value("search.continue", ir.DataType.BOOL),
        *(_value(f"search.{name}", entry.dtype, entry.axes) for name, entry in carried.items()),
    ]
    outputs = [
        ir.Value(name=f"search.{name}.next", type=ir.TensorType(dtype))
        for name, dtype in [
            ("continue", ir.DataType.BOOL),
            *((name, entry.dtype) for name, entry in carried.items()),
            ("written", ir.DataType.INT64),
        ]
    ]
    graph = op.builder.subgraph(body, placeholders, outputs, name="step")
    starts = [entry.start for entry in carried.values()]
    found = op.Loop(strategy.steps, True, *starts, body=graph, _outputs=len(carried) + 1)
    return dict(zip(carried, found[:-1], strict=True)), found[-1]


def _value(name: str, dtype: ir.DataType, axes: tuple[str | int, ...] = ()) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(axes))
