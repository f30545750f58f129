"""Sessions by values: who runs a graph knows none of its names (`export/interface.py`). NumPy in, NumPy out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export.interface import SOURCE_NAMES, Port, Ports
from mlx_transformer.core.inputs import INPUTS
from mlx_transformer.system.errors import UserError

Values = dict[str, NDArray]
"""Arrays by what they are, as ports have it."""


class Session(Protocol):
    """The part of `onnxruntime.InferenceSession` that is used here."""

    def run(self, output_names: Any, input_feed: Any, /) -> Any: ...
    def get_inputs(self) -> Sequence[Any]: ...
    def get_outputs(self) -> Sequence[Any]: ...


class PortSession:
    """One session with its ports. Values that its graph doesn't take are left out of a run."""

    def __init__(self, session: Session, ports: Ports, *options: Any):
        """ports: what is declared of such a graph; one that somebody else made may have fewer of them. options: those
        of every run."""
        self.session, self.where, self.ports = session, getattr(session, "file", "graph"), ports
        self.options = options
        shapes = {entry.name: list(entry.shape) for entry in session.get_inputs()}
        names = [entry.name for entry in session.get_outputs()]
        there = ports.among(shapes, names)
        self.inputs = {port.value: port for port in there.inputs}
        self.outputs = {port.value: port for port in there.outputs}
        self.shapes = {value: shapes[port.name] for value, port in self.inputs.items()}
        """The axes of each input as the graph has them."""
        self._names: dict[tuple[str, ...], list[str]] = {}
        """The outputs to ask the session for, of each choice of outputs that was asked for."""
        self.cache = [value for value in self.outputs if value.startswith("cache.")]
        self.cross = [value for value in self.outputs if value.startswith("cross.")]

    def __call__(self, outputs: Sequence[str], values: Mapping[str, NDArray]) -> Values:
        """Return the wanted outputs, by value. `UserError` for one that isn't there or isn't what was declared."""
        key = tuple(outputs)
        if key not in self._names:
            self.need(outputs=outputs)
            self._names[key] = [self.outputs[value].name for value in outputs]
        names = self._names[key]
        feeds = {port.name: values[value] for value, port in self.inputs.items() if value in values}
        arrays = self.session.run(names, feeds, *self.options)  # type: ignore[call-arg]
        arrays_by_value = dict(zip(outputs, arrays, strict=True))
        for value, array in arrays_by_value.items():
            self._check(self.outputs[value], array)
        return arrays_by_value

    def need(self, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> None:
        """Raise `UserError` unless the graph has them."""
        ports = self.ports
        for kind, needed, there, names in (
            ("input", inputs, self.inputs, ports.input_names),
            ("output", outputs, self.outputs, ports.output_names),
        ):
            for value in needed:
                if value not in there:
                    name = names.get(value, value)
                    raise UserError(f"{self.where}: has no {kind} {name!r}; export the model again")

    def check_source(self, source: Iterable[str]) -> None:
        """Raise `UserError` unless the graph takes these values of a source, ids or vectors, as it was exported."""
        for value in source:
            if value not in self.inputs:
                hint = "export the model again"
                for other in self.inputs.keys() & {*INPUTS} - {*source}:
                    out = "out" * (other == "inputs_embeds")
                    hint = f"give it {SOURCE_NAMES[other]}, or export the model with{out} --inputs-embeds"
                raise UserError(f"{self.where}: takes no {SOURCE_NAMES[value]}: {hint}")

    def _check(self, port: Port, x: Any) -> None:
        last, kinds = port.axes[-1], "fV" if port.dtype == "float32" else "iu"  # V: bfloat16
        if getattr(x, "ndim", -1) != len(port.axes) or x.dtype.kind not in kinds:
            problem = f"its output {port.name} is no tensor of {len(port.axes)} axes"
            raise UserError(f"{self.where}: {problem}; export the model again")
        if x.shape[-1] != last and isinstance(last, int):
            problem = f"its {port.name} are of {x.shape[-1]}, the model has {last}"
            raise UserError(f"{self.where}: {problem}; export the model again")

    def empty_past(self, rows: int) -> Values:
        """Return keys and values of no position at all, of those that the graph takes."""
        past = {value: port for value, port in self.inputs.items() if value.startswith(("cache.", "cross."))}
        return {value: np.zeros(port.without_positions(rows), np.float32) for value, port in past.items()}
