"""The processes that train one model together, each on its share of every step's batches (data parallelism).

Rank 0 alone reads and writes the run's folder. What the others need of it (where the run stands, the weights, the
seconds of the clock, that it is to end) it tells them, bit for bit, so that all do the same.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_transformer.system.errors import UserError

VARIABLE = "MLX_TRANSFORMER_DISTRIBUTED"
"""Set by `mlx-transformer launch`: which of MLX's backends connects the processes."""
SIGNALS = {signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])}
LOST = ("peer", "socket", "connection", "mpi", "nccl", "jaccl")
"""Words of what MLX says when another process is gone."""


class Group:
    """`size` processes, of which this one is `rank`."""

    def __init__(self, group: mx.distributed.Group | None = None):
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def mean(self, gradients: Any) -> Any:
        """The mean over the processes of a tree of float32 arrays, sent in parts of 32 MiB; lazy."""
        return gradients if self._group is None else nn.average_gradients(gradients, self._group)

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers (below 2^31): agreed on before any goes on."""
        if self._group is None:
            return number
        return int(np.array(mx.distributed.all_max(mx.array(number, mx.int32), group=self._group)))

    def told(self, values: Sequence[float]) -> list[float]:
        """Rank 0's values, in every process."""
        if self._group is None:
            return list(values)
        words = mx.array(np.array(values, np.float64).view(np.uint32))
        words = words if self.leads else mx.zeros_like(words)
        return np.array(mx.distributed.all_sum(words, group=self._group)).view(np.float64).tolist()

    def given(self, tree: Any) -> Any:
        """Rank 0's arrays, in every process."""
        if self._group is None:
            return tree
        found = []
        for name, value in cast(list[tuple[str, mx.array]], tree_flatten(tree)):
            sent = value if self.leads else mx.zeros_like(value)
            found.append((name, mx.distributed.all_sum(sent, group=self._group)))
            mx.eval(found[-1][1])
        return tree_unflatten(found)

    def dropout_seed(self, seed: int, step: int) -> int:
        """Of a step, so that a resumed run draws the same, and of this process."""
        if self.leads:
            return (seed << 32) | step
        return int(np.random.SeedSequence((seed, step, self.rank)).generate_state(1, np.uint64)[0])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What MLX says of a process that is gone is a `UserError`."""
        try:
            yield
        except RuntimeError as error:
            said = str(error)
            if self._group is None or not any(word in said.lower() for word in LOST):
                raise
            raise UserError(
                f"rank {self.rank}: another process of the run is gone ({' '.join(said.split())[:200]}); the last "
                "checkpoint is whole: go on with --resume"
            ) from error


ALONE = Group()


def _end_with_launcher() -> None:
    """Save and end, as on SIGTERM, when the process that started this one is gone: nobody else would end it."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def joined() -> Group:
    """The group that this process was started in by `launch`; alone without. `UserError` if it can't be joined."""
    backend = os.environ.get(VARIABLE, "")
    if not backend:
        return ALONE
    _end_with_launcher()
    # MLX's threads inherit what is blocked now: a signal that came to one of them amid a message would cut it
    # short, and the others would wait for the rest for ever.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if hasattr(signal, "pthread_sigmask") else None
    try:
        group = Group(mx.distributed.init(strict=True, backend=backend))
        group.largest(0)  # now they are there
        return group
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"{VARIABLE}={backend}: MLX can't join the other processes ({said}); start by launch"
        ) from error
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
