"""Tests of what a GPU does otherwise run twice on a CPU: with its own choices and with a GPU's."""

import os
from collections import Counter

import pytest
from combined import SLOW
from runtimes import mlx_gpu

DEVICE_CHOICES = ["own"] if mlx_gpu() or "MLX_TRANSFORMER_DEVICE_CHOICES" in os.environ else ["own", "gpu"]
both_choices = [pytest.mark.gpu_path, pytest.mark.usefixtures("device_choices")]
# For the dearest tests of such a file: a GPU's choices in `make test-slow` alone.
gpu_in_slow = pytest.mark.parametrize(
    "device_choices",
    [pytest.param(choice, marks=SLOW if choice == "gpu" else []) for choice in DEVICE_CHOICES],
    indirect=True,
)


def thin(items: list[pytest.Item]) -> None:
    """Of the cases of a file with a GPU's choices, mark all but every eighth slow; `make test-gpu-path` has all."""
    seen = Counter[str]()
    for item in items:
        chosen = getattr(item, "callspec", None)
        if chosen is None or chosen.params.get("device_choices") != "gpu" or item.get_closest_marker("slow"):
            continue
        if seen[str(item.path)] % 8:
            for mark in SLOW:
                item.add_marker(mark)
        seen[str(item.path)] += 1


def keep_fast(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test with `fast(*ids)`, mark all slow but those with these ids.

    Where all tests have a GPU's choices, the case gpu-ID is own-ID.
    """
    named, there = set[tuple[str, str]](), set[tuple[str, str]]()
    for item in items:
        if (fast := item.get_closest_marker("fast")) is not None:
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            there.add((test, case))
            ids = {each if "gpu" in DEVICE_CHOICES else each.replace("gpu-", "own-", 1) for each in fast.args}
            named |= {(test, each) for each in ids}
            if case not in ids:
                for mark in SLOW:
                    item.add_marker(mark)
    if named - there and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"no such cases, of which fast(...) tells: {sorted(named - there)}")
