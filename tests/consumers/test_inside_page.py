"""The page `inside.html` of a site with `--taps`, in headless Chromium: what is typed is translated by the exported
graphs, and all their numbers that it shows are the reference's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import HERE, served
from drawn_walk import hold_drawn
from test_walk_page import answered, passed

from export import export_onnx
from export.explain.inside import FOLDER, inside
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from export.web import write_site
from export.web.write import SITE
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.data.built_in import NOTES
from mlx_transformer.text.tokenizer import Tokenizer

pytestmark = pytest.mark.consumers

TEXTS = ("On the river bank", "YOUR CAT IS A LOVELY CAT", "The mat sat on the cat")
WITHIN = 2e-5
"""Of each point's largest number: the graphs compute in float32, whose step is 1.2e-7."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return translating_site(tmp_path_factory.mktemp("inside"))


def translating_site(folder: Path) -> Path:
    """Of the translator that ships, in float32."""
    shipped = open_checkpoint(FOLDER / "sentences")
    weights = {name: array.astype(np.float32) for name, array in shipped.tensors()}
    save_checkpoint(folder / "model", shipped.config, weights, shipped.tokenizer_json())
    exported = export_onnx(folder / "model", folder / "web", target="web")
    return write_site(exported, folder / "site", assets=HERE / "node" / "node_modules", inside=inside)


@pytest.fixture(scope="module")
def answer(site: Path) -> dict[str, Any]:
    folder = site.parent
    with served(site) as origin:
        return answered(folder, [{"page": f"{origin}/inside.html", "model": 0, "texts": TEXTS}])[0]


def test_every_number_is_of_the_graphs_and_the_references(answer: dict[str, Any], site: Path) -> None:
    assert (answer["problems"], answer["requests"]) == ([], [])
    taps = json.loads((site / SITE).read_text(encoding="utf-8"))["inside"]["taps"]
    for shown in answer["texts"]:
        assert shown["output"] == f"→ {NOTES[shown['text']]}"
        points, *_ = passed("sentences", shown["text"])
        for point, values in shown["numbers"].items():
            assert point in taps["encoder"] or point in taps["decoder"]
            largest = np.abs(points[point][np.isfinite(points[point])]).max()
            for index, value in values.items():
                expected = points[point][tuple(map(int, index.split(",")))]
                assert abs(value - expected) <= WITHIN * largest, (shown["text"], point, index)
        layers = {point for point in points if re.search(r"layers\.\d+(\.\w+_attention\.weights)?$", point)}
        assert layers <= set(shown["numbers"]), "each layer of each stack, and each head"
        assert all(abs(total - terms) < WITHIN * max(1, abs(total)) for terms, total in shown["sums"])


def float32s(text: str) -> dict[str, np.ndarray]:
    """The points of the reference's pass over a text and its translation, computed in float32."""
    opened = open_checkpoint(FOLDER / "sentences")
    points: dict[str, np.ndarray] = {}

    def tap(point: str, value: np.ndarray) -> None:
        points[point] = value[0]

    tokenizer = Tokenizer(str(opened.tokenizer_json()), "sentences")
    reference = Reference(opened.config, dict(opened.tensors()), dtype=np.float32, inner_points=True)
    given = [opened.config.bos_id, *tokenizer.encode(NOTES[text])[:-1]]
    reference([tokenizer.encode(text)], [given], tap=tap)
    return points


def test_the_graphs_err_as_single_precision_must(answer: dict[str, Any]) -> None:
    """By the rule of `validate`, at every point. No constant would do: the largest differences are of scores, which are
    as large as their products; over the notes' sentences they are 5e-6 to 1.1e-5."""
    budget, judged = budget_for("float32", "cpu"), 0
    truths: dict[str, list[tuple[Truth, np.ndarray]]] = {}
    for shown in answer["texts"]:
        right, single = passed("sentences", shown["text"])[0], float32s(shown["text"])
        for point, values in arrays(shown).items():
            finite = np.isfinite(right[point])  # what is masked is -inf on all sides
            assert np.array_equal(finite, np.isfinite(values))
            t64, t32, got = (each[finite][:, None].astype(np.float64) for each in (right[point], single[point], values))
            truths.setdefault(point, []).append((Truth.of(t64, t32, np.ones(len(t64), bool)), got))
    for point, inputs in truths.items():
        pool = ErrorScale.pooled([truth.scale for truth, _ in inputs])
        for truth, got in inputs:
            found = Measurement.of(Deviation.of(got, truth), truth.scale, pool, budget)
            assert found.passed, (point, found)
            judged += got.size
            broken = Deviation.of(got * (1 + 1e-4), truth)
            assert not Measurement.of(broken, truth.scale, pool, budget).passed, point
    assert judged > 100_000


def arrays(shown: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the graphs gave in the browser, by point."""
    return {
        name: np.array([float(value.replace("Infinity", "inf")) for value in each["data"]]).reshape(each["shape"])
        for name, each in shown["tapped"].items()
    }


def test_every_number_drawn_is_an_element_of_what_the_graphs_gave(answer: dict[str, Any]) -> None:
    """In this very browser: at the digits that are drawn, and underneath to 1e-6."""
    shipped = open_checkpoint(FOLDER / "sentences")
    tokenizer = Tokenizer(str(shipped.tokenizer_json()), "sentences")
    for shown in answer["texts"]:
        written = tokenizer.encode(NOTES[shown["text"]])
        assert hold_drawn(shown, arrays(shown), shipped.config, {}, written) > 10_000


def test_the_pages_own_engine_stands_beside_the_graphs(answer: dict[str, Any]) -> None:
    """Point by point: what is shown as the largest difference is that of the two."""
    for shown in answer["texts"]:
        (points, *_), tapped, beside = passed("sentences", shown["text"]), arrays(shown), shown["beside"]
        assert {name.partition(" ")[2] for name in beside if name.startswith("gap")} == set(tapped)
        gaps = {}
        for name, values in tapped.items():
            own, graph = beside[f"own {name}"], beside[f"graph {name}"]
            finite = np.isfinite(values)
            gaps[name] = np.abs(values[finite] - points[name][finite]).max()
            assert abs(beside[f"gap {name}"] - gaps[name]) < 1e-9
            assert abs(abs(own - graph) - gaps[name]) < 1e-8 * max(1, abs(graph))
            assert np.isclose(values[finite], graph, rtol=1e-9, atol=1e-12).any()
        assert abs(beside["largest"] - max(gaps.values())) < 1e-9
