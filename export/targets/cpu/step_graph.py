"""The graphs that one step of decoding runs, with what belongs to every batch that they decode."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from export.interface import Ports
from export.targets.session import Session
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.generation.candidates import Candidates

from .buffer_pool import BufferPool


class StepGraph:
    """A graph of one step, with what belongs to every batch that it decodes."""

    def __init__(
        self,
        session: Any,
        ports: Ports,
        config: TransformerConfig,
        memory: BufferPool,
        options: Any,
    ):
        """session and options (of its runs): ONNX Runtime's."""
        self.arrays: Mapping[str, NDArray] = {}
        """Inputs that are the same at every step, by their names."""
        self.candidates: Candidates | None = None
        """The ids that its logits are of, if they aren't of all ids; `config` is of as many."""
        self.session, self.config, self.memory, self.options = session, config, memory, options
        self.inputs, self.outputs = ports.input_names, ports.output_names
        self.made = {port.value: port for port in ports.outputs}
        self.cache = [value for value in self.outputs if value.startswith("cache.")]
        self.cross = [value for value in self.inputs if value.startswith("cross.")]

    def among(self, candidates: Candidates, inputs: Mapping[str, NDArray]) -> StepGraph:
        """Return the same with the logits of these alone, whose rows are `inputs`."""
        chosen = copy(self)
        chosen.config, chosen.candidates, chosen.arrays = candidates.config, candidates, inputs
        return chosen


@dataclass(frozen=True)
class ListedGraphs:
    """`rows`: gives the classifier's rows of `ids` as its `outputs`, inputs of `step` by the same names."""

    rows: Session
    ids: str
    outputs: list[str]
    step: StepGraph
