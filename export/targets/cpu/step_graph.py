"""Memory of batches that are decoded one after the other.

New memory costs time when it is first written: the system clears it page by page. For the keys and values of 32
sentences with 4 beams that is a tenth of the time of decoding them. Memory that the allocator keeps anyway isn't
pooled.

The graphs that one step of decoding runs, with what belongs to every batch that they decode.
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
"""Elements below which an array comes from the allocator and goes back to it."""


class BufferPool:
    """Lends float32 arrays, from any thread. It never holds more than was lent at one time."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []  # smallest first
        self._lent = self._most = 0  # elements: lent now, and at the most
        self._lock = threading.Lock()
        # Python may finalize a decoder in the middle of `take`, in the very thread that holds the lock: what comes back
        # waits here, in the one queue that is safe for that.
        self._returned: SimpleQueue[Buffer] = SimpleQueue()

    def take(self, shape: tuple[int, ...]) -> Buffer:
        """Lend an array of that shape, with any contents."""
        count = math.prod(shape)
        if count < SMALL:
            return np.empty(shape, np.float32)
        with self._lock:
            self._settle()
            # The smallest that is large enough; what of it isn't asked for stays untouched.
            place = bisect_left(self._free, count, key=_size)
            buffer = self._free.pop(place) if place < len(self._free) else np.empty(count, np.float32)
            self._lent += buffer.size
            self._most = max(self._most, self._lent)
            self._trim()
        return buffer[:count].reshape(shape)

    def give_back(self, arrays: Iterable[Buffer]) -> None:
        """Take back arrays that `take` returned and nobody reads any more."""
        for array in arrays:
            if array.base is not None:
                self._returned.put(cast(Buffer, array.base))

    def _settle(self) -> None:
        while not self._returned.empty():
            buffer = self._returned.get()
            self._lent -= buffer.size
            insort(self._free, buffer, key=_size)

    def _trim(self) -> None:
        """Drop arrays beyond the limit, the smallest first: a larger one can stand in for them."""
        free = sum(map(_size, self._free))
        while self._free and self._lent + free > self._most:
            free -= self._free.pop(0).size


def _size(buffer: Buffer) -> int:
    return buffer.size


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
