"""`PortSession`: runs a session by values, e.g. "source_mask", whatever the graph's names (`export/interface.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export.interface import SOURCE_NAMES, Port, Ports
from mlx_transformer.core.inputs import INPUTS
from mlx_transformer.system.errors import UserError

Values = dict[str, NDArray]
"""{value of a port: array}, e.g. {"source_mask": mask}."""


class Session(Protocol):
    """The used part of `onnxruntime.InferenceSession`."""

    def run(self, output_names: Any, input_feed: Any, /) -> Any: ...
    def get_inputs(self) -> Sequence[Any]: ...
    def get_outputs(self) -> Sequence[Any]: ...


class PortSession:
    """A session with its ports; NumPy in, NumPy out. A run ignores values that the graph doesn't take."""

    def __init__(self, session: Session, ports: Ports, *options: Any):
        """ports: declared for such a graph; a graph from another exporter may lack some. options: of every run."""
        self.session, self.where, self.ports = session, getattr(session, "file", "graph"), ports
        self.options = options
        shapes = {entry.name: list(entry.shape) for entry in session.get_inputs()}
        names = [entry.name for entry in session.get_outputs()]
        there = ports.among(shapes, names)
        self.inputs = {port.value: port for port in there.inputs}
        self.outputs = {port.value: port for port in there.outputs}
        self.shapes = {value: shapes[port.name] for value, port in self.inputs.items()}
        """{value: axes in the graph} of the inputs."""
        self._names: dict[tuple[str, ...], list[str]] = {}
        """{values of outputs: their names}, for the sets of outputs requested so far."""
        self.cache = [value for value in self.outputs if value.startswith("cache.")]
        self.cross = [value for value in self.outputs if value.startswith("cross.")]

    def __call__(self, outputs: Sequence[str], values: Mapping[str, NDArray]) -> Values:
        """Run the graph; returns these outputs by value. `UserError` if an output is missing or not as declared."""
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
        """Raise `UserError` unless the graph has these values."""
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
        """Raise `UserError` unless the graph takes these source values: ids or vectors, as it was exported."""
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
        """The graph's inputs of cached keys and values, with zero positions; states are zeros."""
        past = {value: port for value, port in self.inputs.items() if value.startswith(("cache.", "cross."))}
        return {value: np.zeros(port.without_positions(rows), np.float32) for value, port in past.items()}
