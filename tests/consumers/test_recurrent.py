"""The page's own searches over a decoder of SSRUs, whose state has no positions: the tokens of our runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import HERE
from random_models import write_model

from export import OnnxTransformer
from export.interface import GRAPHS
from export.runtime.folder import open_folder
from export.web.models import STEPS
from export.web.write import CONFIG
from mlx_transformer.core.config import TransformerConfig

pytestmark = pytest.mark.consumers

PAGE = Path(__file__).parents[2] / "export" / "web" / "page"
BEAM = 3


def test_the_page_decodes_as_our_runtime(tmp_path: Path) -> None:
    config = TransformerConfig(
        vocab_size=31,
        d_model=16,
        heads=4,
        d_ff=24,
        encoder_layers=1,
        decoder_layers=2,
        max_positions=24,
        decoder_self_attention="ssru",
        positions="sinusoidal_concat",
    )
    _, folder = write_model(config, tmp_path, target="web")
    rows = [row.tolist() for row in np.random.default_rng(0).integers(3, 31, (4, 7))]
    ports = {name: GRAPHS[graph](open_folder(folder).request) for name, graph in STEPS.items()}
    task = {
        "graphs": {name: str(folder / "onnx" / f"{graph}.onnx") for name, graph in STEPS.items()},
        "names": {name: {"inputs": p.input_names, "outputs": p.output_names} for name, p in ports.items()},
        "config": {name: getattr(config, name) for name in CONFIG},
        "rows": rows,
        "beam": BEAM,
    }
    shutil.copytree(PAGE, tmp_path / "page")
    (tmp_path / "page" / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (tmp_path / "task.json").write_text(json.dumps(task), encoding="utf-8")
    arguments = [str(tmp_path / name) for name in ("page", "task.json", "answer.json")]
    done = subprocess.run(["node", str(HERE / "node" / "with_steps.mjs"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    model = OnnxTransformer(folder)
    for row, expected in zip(found["greedy"], best(model, rows), strict=True):
        assert row[: len(expected)] == expected
        assert row[len(expected) :] in ([], [config.eos_id])
    assert found["beam"] == best(model, rows, beam=BEAM, length_penalty=0.6)


def best(model: OnnxTransformer, rows: list[list[int]], **options: Any) -> list[list[int]]:
    return [hypotheses[0].ids for hypotheses in model.search(rows, **options)]
