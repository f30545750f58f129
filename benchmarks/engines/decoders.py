"""Peers that only continue prompts: onnxruntime-genai and mlx-lm.

MLX has no setting for its threads on a CPU: its process may run on as many cores as there are to be threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import Rows

Reached = Callable[[], None]


def first_of(steps: Iterator[Any], reached: Reached) -> Iterator[Any]:
    """The same, and tell when the first is there."""
    for i, step in enumerate(steps):
        if i == 0:
            reached()
        yield step


class Genai:
    """onnxruntime-genai, with its keys and values in buffers of their full length."""

    def __init__(self, folder: Path, parts: list[str], threads: int):
        import onnxruntime_genai as og  # type: ignore[import-not-found]

        self.og, config = og, og.Config(str(folder))
        threads_of = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads_of}}}))
        self.model = og.Model(config)

    def continued(self, prompts: Rows, count: int, reached: Reached) -> Rows:
        import numpy as np

        length = len(prompts[0]) + count
        params = self.og.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, max_length=length, min_length=length, batch_size=len(prompts))
        generator = self.og.Generator(self.model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        reached()
        for _ in range(count - 1):
            generator.generate_next_token()
        return [generator.get_sequence(i)[-count:].tolist() for i in range(len(prompts))]


class MlxLm:
    """mlx-lm: its generator of one prompt, or of a batch."""

    def __init__(self, folder: Path, parts: list[str], threads: int):
        pin(threads)
        from mlx_lm import load  # type: ignore[import-not-found]

        self.model, _ = load(str(folder))[:2]

    def continued(self, prompts: Rows, count: int, reached: Reached) -> Rows:
        if len(prompts) > 1:
            return self._batch(prompts, count, reached)
        import mlx.core as mx
        from mlx_lm.generate import generate_step  # type: ignore[import-not-found]

        steps = generate_step(mx.array(prompts[0]), self.model, max_tokens=count)
        return [[int(token) for token, _ in first_of(steps, reached)]]

    def _batch(self, prompts: Rows, count: int, reached: Reached) -> Rows:
        from mlx_lm.generate import BatchGenerator  # type: ignore[import-not-found]

        generator = BatchGenerator(self.model, completion_batch_size=len(prompts), prefill_batch_size=len(prompts))
        outputs: dict[int, list[int]] = {uid: [] for uid in generator.insert(prompts, [count] * len(prompts))}
        for responses in first_of(iter(generator.next_generated, []), reached):
            for response in responses:
                outputs[response.uid].append(int(response.token))
        generator.close()
        return list(outputs.values())


def pin(threads: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
