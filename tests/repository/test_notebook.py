"""The notebook of the documents: its cells run in their order, and it is stored without what they print."""

from __future__ import annotations

import json
import re

import notebook_cells
import pytest
from imports import ROOT
from standalone_page import read

NOTEBOOK = ROOT / "docs" / "from_clone_to_proof.ipynb"


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """What all cells print and show, as text, run with these parameters in an empty folder."""

    def run(*parameters: str) -> str:
        monkeypatch.chdir(tmp_path)
        notebook_cells.run(NOTEBOOK, *parameters)
        return "\n".join(read(line) if line.startswith("<") else line for line in capsys.readouterr().out.splitlines())

    return run


def check(said: str, lines: int) -> None:
    for words in ("Transformer: ", "encoder-decoder", "OnnxTransformer: ", "validate: equal", "weights bit for bit"):
        assert words in said
    assert f"All {lines} outputs are the same." in said
    assert re.search(r"peak memory[\d.]+ MB[\d.]+ MB", said)


@pytest.mark.slow
def test_its_cells_run(shown, tmp_path):
    check(shown("STEPS, PAIRS, LINES = 2, 300, 10"), 10)
    assert not list(tmp_path.iterdir()), "nothing is left where it runs"


@pytest.mark.slow
def test_its_cells_run_as_they_are(shown):
    said = shown()
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
