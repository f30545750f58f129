"""Data parallelism: several processes train one model, each on its share of every step's batches.

Only rank 0 reads and writes the run's folder. It broadcasts counters, weights, clock and stop signals bit for bit, so
all processes take the same steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlx_transformer.nn.parameters import named_arrays
from mlx_transformer.system.early import HANGUP
from mlx_transformer.system.errors import UserError, error_line

VARIABLE = "MLX_TRANSFORMER_DISTRIBUTED"
"""Environment variable set by `mlx-transformer launch`: the MLX backend that connects the processes."""
LAUNCHER = "MLX_TRANSFORMER_LAUNCHER"
"""Set by `launch` if it keeps running: its process id. `os.getppid()` may be too late, since the launcher may be gone
before the others have imported this module."""
SIGNALS = {signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else [])}
LOST = ("peer", "socket", "connection", "mpi", "nccl", "jaccl")
"""Words in MLX's errors when another process is gone."""


class Group:
    """A group of `size` processes; this process is number `rank`."""

    def __init__(self, group: mx.distributed.Group | None = None):
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def mean(self, gradients: Any) -> Any:
        """Average a tree of float32 arrays over the processes, sent in parts of 32 MiB. Lazy."""
        return gradients if self._group is None else nn.average_gradients(gradients, self._group)

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers (below 2^31). Waits until all processes have called it."""
        if self._group is None:
            return number
        return int(np.array(mx.distributed.all_max(mx.array(number, mx.int32), group=self._group)))

    def broadcast(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's values in every process."""
        if self._group is None:
            return list(values)
        words = mx.array(np.array(values, np.float64).view(np.uint32))
        words = words if self.leads else mx.zeros_like(words)
        return np.array(mx.distributed.all_sum(words, group=self._group)).view(np.float64).tolist()

    def broadcast_arrays(self, tree: Any) -> Any:
        """Return rank 0's tree of arrays in every process."""
        if self._group is None:
            return tree
        received = []
        for name, value in named_arrays(tree):
            sent = value if self.leads else mx.zeros_like(value)
            received.append((name, mx.distributed.all_sum(sent, group=self._group)))
            mx.eval(received[-1][1])
        return tree_unflatten(received)

    def dropout_seed(self, seed: int, step: int) -> int:
        """The seed of a step's dropout, different in each process; a resumed run draws the same masks."""
        if self.leads:
            return (seed << 32) | step
        return int(np.random.SeedSequence((seed, step, self.rank)).generate_state(1, np.uint64)[0])

    @contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Turn MLX's error about a lost process into a `UserError`."""
        try:
            yield
        except RuntimeError as error:
            if self._group is None or not any(word in str(error).lower() for word in LOST):
                raise
            raise UserError(
                f"rank {self.rank}: another process of the run is gone ({error_line(error)}); the last "
                "checkpoint is whole: go on with --resume"
            ) from error


ALONE = Group()


def _end_with_launcher() -> None:
    """Send this process SIGTERM once its launcher is gone, so that it saves and ends; nobody else would stop it."""
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def joined() -> Group:
    """Join the group in which `launch` started this process; `ALONE` if it didn't. Raises UserError if that fails."""
    backend = os.environ.get(VARIABLE, "")
    if not backend:
        return ALONE
    _end_with_launcher()
    # MLX's threads inherit the signals blocked here. Otherwise a signal could interrupt a thread in the middle of a
    # message, and the other processes would wait for the rest forever.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if hasattr(signal, "pthread_sigmask") else None
    try:
        group = Group(mx.distributed.init(strict=True, backend=backend))
        group.largest(0)  # waits until all processes are there
        return group
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{VARIABLE}={backend}: MLX can't join the other processes ({error_line(error)}); start by launch"
        ) from error
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
