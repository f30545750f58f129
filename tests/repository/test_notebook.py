"""The notebook of the documents: its cells run in their order, and it is stored without what they print."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from imports import ROOT
from standalone_page import read

NOTEBOOK = ROOT / "docs" / "from_clone_to_proof.ipynb"
RUNNER = Path(__file__).parents[1] / "helpers" / "notebook_cells.py"


def shown(folder: Path, *parameters: str) -> str:
    """What all cells print and show, as text."""
    command = [sys.executable, str(RUNNER), str(NOTEBOOK), *parameters]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return "\n".join(read(line) if line.startswith("<") else line for line in done.stdout.splitlines())


def check(said: str, lines: int) -> None:
    for words in ("Transformer: ", "encoder-decoder", "OnnxTransformer: ", "validate: equal", "weights bit for bit"):
        assert words in said
    assert f"All {lines} outputs are the same." in said
    assert re.search(r"peak memory[\d.]+ MB[\d.]+ MB", said)


def test_its_cells_run(tmp_path):
    check(shown(tmp_path, "STEPS, PAIRS, LINES = 2, 300, 10"), 10)
    assert not list(tmp_path.iterdir()), "nothing is left where it runs"


@pytest.mark.slow
def test_its_cells_run_as_they_are(tmp_path):
    said = shown(tmp_path)
    check(said, 200)
    bleu = float(re.search(r"^\(([\d.]+), [\d.]+\)$", said, re.MULTILINE)[1])
    assert bleu > 10, "it has learned something"


def test_it_holds_no_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert [cell["metadata"].get("tags") for cell in code].count(["parameters"]) == 1
    assert notebook["nbformat"] == 4
