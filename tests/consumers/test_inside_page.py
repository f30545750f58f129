"""The page `inside.html` of a site with `--taps`, in headless Chromium: what is typed is translated by the exported
graphs, and all their numbers that it shows are the reference's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import HERE, SECONDS
from imports import ROOT
from test_walk_page import passed

from export import export_onnx
from export.explain.inside import inside
from export.explain.shipped import FOLDER
from export.web import write_site
from export.web.site import SITE
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.data.sentences import NOTES

pytestmark = pytest.mark.consumers

TEXTS = ("On the river bank", "YOUR CAT IS A LOVELY CAT", "The mat sat on the cat")
WITHIN = 2e-5
"""Of each point's largest number: the graphs compute in float32, whose step is 1.2e-7."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the translator that ships, in float32."""
    folder = tmp_path_factory.mktemp("inside")
    shipped = open_checkpoint(FOLDER / "sentences")
    weights = {name: array.astype(np.float32) for name, array in shipped.tensors()}
    save_checkpoint(folder / "model", shipped.config, weights, shipped.tokenizer_json())
    exported = export_onnx(folder / "model", folder / "web", target="web")
    return write_site(exported, folder / "site", assets=HERE / "node" / "node_modules", inside=inside)


@pytest.fixture(scope="module")
def answer(site: Path) -> dict[str, Any]:
    folder = site.parent
    command = [sys.executable, "-m", "export", "serve", "--web", str(site), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        [origin] = re.findall(r"on (http://127\.0\.0\.1:\d+) ", server.stderr.readline())
        tasks = [{"page": f"{origin}/inside.html", "model": 0, "texts": TEXTS}]
        (folder / "tasks.json").write_text(json.dumps(tasks), encoding="utf-8")
        script = [
            "node",
            str(HERE / "node" / "with_walk.mjs"),
            str(folder / "tasks.json"),
            str(folder / "answers.json"),
        ]
        try:
            done = subprocess.run(script, capture_output=True, text=True, timeout=SECONDS, env=os.environ)
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text(encoding="utf-8"))[0]


def test_every_number_is_of_the_graphs_and_the_references(answer: dict[str, Any], site: Path) -> None:
    assert (answer["problems"], answer["requests"]) == ([], [])
    taps = json.loads((site / SITE).read_text(encoding="utf-8"))["inside"]["taps"]
    for shown in answer["texts"]:
        assert shown["output"] == f"→ {NOTES[shown['text']]}"
        points, _ = passed("sentences", shown["text"])
        for point, values in shown["numbers"].items():
            assert point in taps["encoder"] or point in taps["decoder"]
            largest = np.abs(points[point][np.isfinite(points[point])]).max()
            for index, value in values.items():
                expected = points[point][tuple(map(int, index.split(",")))]
                assert abs(value - expected) <= WITHIN * largest, (shown["text"], point, index)
        layers = {point for point in points if re.search(r"layers\.\d+(\.\w+_attention\.weights)?$", point)}
        assert layers <= set(shown["numbers"]), "each layer of each stack, and each head"
        assert max(abs(total - terms) for terms, total in shown["sums"]) < WITHIN * 100
