"""`StepGraph`, the graph of a decoding step and everything its batches share, and `BufferPool` for their caches.

The pool reuses memory from batch to batch. New memory costs time when it is first written, because the system clears it
page by page. For the keys and values of 32 sentences with 4 beams this takes a tenth of the decoding time. Small arrays
aren't pooled, since the allocator keeps their memory anyway.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from export.interface import Ports
from export.targets.session import Session
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.candidates import Candidates

Buffer = NDArray[np.float32]

SMALL = 1 << 16
"""Arrays with fewer elements are not pooled."""


class BufferPool:
    """Lends float32 arrays to any thread. Free and lent arrays together never exceed the most lent at one time."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []  # smallest first
        self._lent = self._most = 0  # elements lent now, and the most so far
        self._lock = threading.Lock()
        # Python may finalize a decoder during `take`, in the thread that holds the lock. Returned buffers wait here;
        # SimpleQueue is safe to use then.
        self._returned: SimpleQueue[Buffer] = SimpleQueue()

    def take(self, shape: tuple[int, ...]) -> Buffer:
        """Lend an array of this shape with arbitrary contents."""
        count = math.prod(shape)
        if count < SMALL:
            return np.empty(shape, np.float32)
        with self._lock:
            self._settle()
            # The smallest buffer that is large enough; the rest of it stays untouched.
            place = bisect_left(self._free, count, key=_size)
            buffer = self._free.pop(place) if place < len(self._free) else np.empty(count, np.float32)
            self._lent += buffer.size
            self._most = max(self._most, self._lent)
            self._trim()
        return buffer[:count].reshape(shape)

    def give_back(self, arrays: Iterable[Buffer]) -> None:
        """Take back arrays from `take` when they are no longer in use."""
        for array in arrays:
            if array.base is not None:
                self._returned.put(cast(Buffer, array.base))

    def _settle(self) -> None:
        while not self._returned.empty():
            buffer = self._returned.get()
            self._lent -= buffer.size
            insort(self._free, buffer, key=_size)

    def _trim(self) -> None:
        """Drop free buffers beyond the limit, the smallest first: larger buffers can replace them."""
        free = sum(map(_size, self._free))
        while self._free and self._lent + free > self._most:
            free -= self._free.pop(0).size


def _size(buffer: Buffer) -> int:
    return buffer.size


class StepGraph:
    """The graph of a decoding step: its session, config, buffers, names of inputs and outputs."""

    def __init__(
        self,
        session: Any,
        ports: Ports,
        config: TransformerConfig,
        memory: BufferPool,
        options: Any,
    ):
        """session, options: ONNX Runtime's session, and its RunOptions for every run."""
        self.arrays: Mapping[str, NDArray] = {}
        """{name: array} of inputs that are the same at every step."""
        self.candidates: Candidates | None = None
        """The ids that have logits; None for all. `config.vocab_size` is the number of logits."""
        self.session, self.config, self.memory, self.options = session, config, memory, options
        self.inputs, self.outputs = ports.input_names, ports.output_names
        self.made = {port.value: port for port in ports.outputs}
        self.cache = [value for value in self.outputs if value.startswith("cache.")]
        self.cross = [value for value in self.inputs if value.startswith("cross.")]

    def among(self, candidates: Candidates, inputs: Mapping[str, NDArray]) -> StepGraph:
        """A copy that computes only the candidates' logits. `inputs`: the classifier's rows of these ids."""
        chosen = copy(self)
        chosen.config, chosen.candidates, chosen.arrays = candidates.config, candidates, inputs
        return chosen


@dataclass(frozen=True)
class ListedGraphs:
    """The graphs of a search among given ids.

    rows: gathers the classifier's rows of ids. ids: the name of its input. outputs: the names of its outputs, which are
    inputs of `step`.
    """

    rows: Session
    ids: str
    outputs: list[str]
    step: StepGraph
