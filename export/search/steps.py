"""The loop of every kind of search, in standard `Loop`s. Twin of `decoding/steps.py`.

Run the decoder one step, choose tokens, until all sentences are finished; drop finished sentences along the way.

Shapes: B sentences, b sentences of a phase, K hypotheses of a sentence, h hypotheses before a step (1 before the first,
then K), V vocabulary, T steps, S source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import onnx_ir as ir

from export.interface import BATCH
from export.nn.primitives import Op, scope, size

DROP_BELOW = (3, 4)
"""A phase ends when at most this share of its sentences is open. Dropping copies the remaining caches, so it has to
pay."""


STEPS = "steps"
"""Name of the innermost graph, which runs once per token."""


@dataclass(frozen=True)
class Carried:
    """A value passed from iteration to iteration. start: its value before the first; axes: a number is fixed, a name
    may grow."""

    start: ir.Value
    dtype: ir.DataType
    axes: tuple[str | int, ...]


State = dict[str, ir.Value]
"""Carried values by name, within the loop's body."""


class Decoder(Protocol):
    """A batch being decoded. Its values of the source come from outside the loop."""

    read_width: ir.Value | None
    """S (1,), if steps also return what they read of the source; otherwise None."""

    def initial(self, op: Op) -> dict[str, Carried]:
        """The caches before the first token, outside the loop."""
        ...

    def at(self, op: Op, index: ir.Value) -> Decoder:
        """The same decoder for the sentences `index` (b,) of the batch."""
        ...

    def step(self, op: Op, ids: ir.Value, state: State, t: ir.Value) -> tuple[ir.Value, State, ir.Value | None]:
        """Run the last tokens (b, h) at position t (scalar). Returns logits (b, h, V), the new caches, and (if
        `read_width`) the attention to each source token (b, h, S)."""
        ...

    def reorder(self, op: Op, state: State, parents: ir.Value) -> State:
        """Reorder the caches: hypothesis k continues from parents[:, k]. parents (b, K), each 0 to h - 1."""
        ...


class Strategy(Protocol):
    """Chooses the next tokens, and keeps the state of each sentence."""

    steps: ir.Value
    """Most steps (scalar)."""
    size: ir.Value
    """B (1,)."""
    result_names: tuple[str, ...]
    """Names of the results in the state, (B, K) each; they no longer change once a sentence is finished."""

    def initial(self, op: Op) -> dict[str, Carried]:
        """The initial state: `ids` (B, 1), the start tokens; `open` (B,), true until a sentence is finished; and
        whatever else it needs."""
        ...

    def at(self, op: Op, index: ir.Value) -> Strategy:
        """The same strategy for the sentences `index` (b,) of the batch."""
        ...

    def choose(self, op: Op, logits: ir.Value, state: State, t: ir.Value) -> tuple[State, ir.Value, ir.Value]:
        """Choose new token number t by logits (b, h, V). Returns the state with the new `ids` (b, K), parents (b, K),
        and a record of the step (b, K) for the end."""
        ...


WRITTEN, READ = "written", "read"
"""The records of all steps: the strategy's (T, B, K), and the attention to the source (T, B, K, S)."""


def run(op: Op, decoder: Decoder, strategy: Strategy) -> tuple[State, State]:
    """Decode to the end; return the strategy's results (B, K) by name, and the records of each step.

    index (b,), t0, caches, ids, ... --> phase: steps with these b sentences --> their results, at their places
          ^                                                |                     records (T, B, K)
          +-------- values of the open sentences ----------+
    """
    strategy_state, caches = strategy.initial(op), decoder.initial(op)
    states: Mapping[str, Carried] = {**strategy_state, **caches}
    count = op.Squeeze(strategy.size, [0])
    none = op.Reshape(strategy_state[strategy.result_names[0]].start, [0, -1])  # (B, K), only its shape matters
    integer = ir.DataType.INT64
    carried = {
        "index": Carried(op.Range(0, count, 1), integer, ("phase",)),
        "t": Carried(op.Sub(count, count), integer, ()),
        **(nothing := _no_columns(op, none, decoder.read_width)),
        **{f"all.{name}": replace(states[name], axes=(BATCH, "beam")) for name in strategy.result_names},
        **states,
    }

    def body(op: Op, values: State) -> tuple[ir.Value, State, list[ir.Value]]:
        index = values["index"]
        before = {name: replace(entry, start=values[name]) for name, entry in states.items()}
        remaining = decoder.at(op, index), strategy.at(op, index)
        after, written = _phase(op, *remaining, before, tuple(caches), values["t"], strategy.steps, size(op, index, 0))
        place = op.Unsqueeze(index, [1])
        results = {f"all.{n}": op.ScatterND(values[f"all.{n}"], place, after[n]) for n in strategy.result_names}
        # Each sentence's column of the records; dropped sentences get a column of zeros after the last.
        b = op.Shape(index)
        column = op.ScatterElements(op.Expand(b, strategy.size), index, op.Range(0, op.Squeeze(b, [0]), 1))
        spread = {name: op.Gather(op.Pad(x, _one_more(nothing[name])), column, axis=1) for name, x in written.items()}
        keep = op.Squeeze(op.NonZero(after["open"]), [0])
        going = {name: op.Gather(after[name], keep, axis=0) for name in states}
        moved = {
            "index": op.Gather(index, keep),
            "t": op.Add(values["t"], size(op, written[WRITTEN], 0)),
            **{name: op.Concat(values[name], x, axis=0) for name, x in spread.items()},
        }
        return op.Cast(op.Size(keep), to=ir.DataType.BOOL), {**moved, **results, **going}, []

    results, _ = looped(op, "phases", strategy.steps, carried, body)
    return {name: results[f"all.{name}"] for name in strategy.result_names}, {name: results[name] for name in nothing}


def _no_columns(op: Op, none: ir.Value, source: ir.Value | None) -> dict[str, Carried]:
    """The empty records before the first step. none: any (B, K); source: S (1,) if attention is recorded."""
    empty, axes = op.Concat([0], op.Shape(none), axis=0), ("steps", BATCH, "beam")
    columns = {WRITTEN: Carried(op.Expand(0, empty), ir.DataType.INT64, axes)}
    if source is not None:
        zeros = op.Expand(0.0, op.Concat(empty, source, axis=0))
        columns[READ] = Carried(zeros, ir.DataType.FLOAT, (*axes, "source"))
    return columns


def _one_more(column: Carried) -> list[int]:
    """Pad's widths for one more column on the axis of sentences."""
    rank = len(column.axes)
    return [0] * rank + [0, 1] + [0] * (rank - 2)


def _phase(
    op: Op,
    decoder: Decoder,
    strategy: Strategy,
    carried: dict[str, Carried],
    caches: tuple[str, ...],
    t0: ir.Value,
    steps: ir.Value,
    count: ir.Value,
) -> tuple[State, State]:
    r"""Run steps from number t0 on, until enough of the b = `count` sentences can be dropped.

    Returns the carried values, and the records of each step.

        t --------------------------------+-------------+
        ids, caches --> decoder.step --> logits --> strategy.choose --> ids, parents --> decoder.reorder --> caches
        scores, ends, open -------------------------^   |   \--> open: enough sentences left? -> next iteration
                                                        \--> record (b, K): the Loop stacks them (T, b, K)
    """
    enough = op.Div(op.Mul(count, DROP_BELOW[0]), DROP_BELOW[1])

    def body(op: Op, values: State) -> tuple[ir.Value, State, list[ir.Value]]:
        t = op.Add(t0, values["iteration"])
        state = {name: values[name] for name in caches}
        logits, decoded, read = decoder.step(op, values["ids"], state, t)
        rest = {name: values[name] for name in carried if name not in caches}
        chosen, parents, written = strategy.choose(op, logits, rest, t)
        decoded = decoder.reorder(op, decoded, parents)
        open_count = op.ReduceSum(op.Cast(chosen["open"], to=ir.DataType.INT64), keepdims=0)
        written_by_step = [written]
        if read is not None:  # the first step has one hypothesis; repeat it to K as in later steps
            written_by_step.append(op.Expand(read, op.Concat(op.Shape(written), [1], axis=0)))
        return op.Greater(open_count, enough), {**chosen, **decoded}, written_by_step

    types = {WRITTEN: ir.DataType.INT64} | ({} if decoder.read_width is None else {READ: ir.DataType.FLOAT})
    after, written_by_step = looped(op, STEPS, op.Sub(steps, t0), carried, body, types)
    return after, dict(zip(types, written_by_step, strict=True))


Body = Callable[[Op, State], tuple[ir.Value, State, list[ir.Value]]]
"""From carried values by name, and `iteration`: whether to continue, the values for the next iteration, values to
stack."""


def looped(
    op: Op,
    name: str,
    most: ir.Value,
    carried: Mapping[str, Carried],
    body: Body,
    stacked: Mapping[str, ir.DataType] = MappingProxyType({}),
) -> tuple[State, list[ir.Value]]:
    """Loop at most `most` times. Returns the last carried values, and the stacked values, whose types are `stacked`."""

    def traced(op: Op, iteration: ir.Value, _: ir.Value, *values: ir.Value) -> list[ir.Value]:
        with scope(op, name, "Loop"):
            more, after, pieces = body(op, {"iteration": iteration, **dict(zip(carried, values, strict=True))})
        return [more, *(after[key] for key in carried), *pieces]

    inputs = [
        _value(f"{name}.iteration", ir.DataType.INT64),
        _value(f"{name}.continue", ir.DataType.BOOL),
        *(_value(f"{name}.{key}", entry.dtype, entry.axes) for key, entry in carried.items()),
    ]
    types = {"continue": ir.DataType.BOOL, **{key: entry.dtype for key, entry in carried.items()}}
    types |= {f"stacked.{key}": dtype for key, dtype in stacked.items()}
    outputs = [ir.Value(name=f"{name}.{key}.next", type=ir.TensorType(dtype)) for key, dtype in types.items()]
    graph = op.builder.subgraph(traced, inputs, outputs, name=name)
    starts = [entry.start for entry in carried.values()]
    outputs = op.Loop(most, True, *starts, body=graph, _outputs=len(carried) + len(stacked))
    for value, entry in zip(outputs, carried.values(), strict=False):
        value.type, value.shape = ir.TensorType(entry.dtype), ir.Shape(entry.axes)
    return dict(zip(carried, outputs, strict=False)), list(outputs[len(carried) :])


def _value(name: str, dtype: ir.DataType, axes: tuple[str | int, ...] = ()) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(axes))
