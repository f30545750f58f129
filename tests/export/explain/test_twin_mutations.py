"""Bugs put into twin.js, each of which its tests must see: copies of the page's scripts are changed, and held against
the reference."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import twin
from imports import ROOT
from small_models import random_weights

from export.validate.reference import Reference
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

PAGES = ("explain/live", "web/page")
SOURCE, TARGET = [5, 9, 30, 7, 2], [1, 8, 31, 4, 12]
CONFIG = TransformerConfig(
    vocab_size=40, d_model=16, heads=4, d_ff=24, max_positions=40, encoder_layers=2, decoder_layers=2
)
HEAD_OFF = {"heads": [["decoder", 1, "cross_attention", 2]]}


class Bug(NamedTuple):
    """`old` becomes `new` in one of the scripts."""

    old: str
    new: str
    file: str = "twin.js"


BUGS = {
    "scaled by sqrt(d_model)": Bug("1 / Math.sqrt(d_k)", "1 / Math.sqrt(D)"),
    "no epsilon": Bug("Math.sqrt(variance + epsilon)", "Math.sqrt(variance)", "layers.js"),
    "an epsilon of 1e-6": Bug("c.norm_epsilon", "1e-6"),
    "no mask": Bug("!this.off.mask", "false"),
    "a mask one place off": Bug("> S - L + Math", "> S - L + 1 + Math"),
    "gamma for beta": Bug("w[`${name}.bias`], c.norm", "w[`${name}.weight`], c.norm"),
    "heads one off": Bug("(i * heads + h) * d", "(i * heads + (h + 1) % heads) * d", "layers.js"),
    "the head beside it is off": Bug("each[3] === head", "each[3] === head + 1"),
    "rows named by the token read": Bug("ids.slice(1) : ids", "ids : ids"),
    "positions from 1": Bug("const start = first", "const start = 1 + first"),
    "cosines for sines": Bug("PE[sine] = Math.fround(Math.sin", "PE[sine] = Math.fround(Math.cos", "layers.js"),
    "a base of 9999": Bug("10000 **", "9999 **", "layers.js"),
    "embeddings not scaled": Bug("value * scale), D);", "value), D);"),
    "half the residual": Bug("sum(x, y), D);", "sum(x.map((v) => v / 2), y), D);"),
    "ReLU an identity": Bug("Math.max(x, 0)", "x", "layers.js"),
    "the variance of a sample": Bug("(value - mean) ** 2, 0) / n", "(value - mean) ** 2, 0) / (n - 1)", "layers.js"),
    "each layer reads the first one's memory": Bug("past.cross[i]", "past.cross[0]"),
    "what was written is forgotten": Bug("if (!past.length)", "if (past)", "layers.js"),
    "positions begin again with each step": Bug("ids, past.length)", "ids, 0)"),
}


def tasks(package: Path, model: Path) -> list[dict[str, Any]]:
    common: dict[str, Any] = {"package": str(package), "model": str(model), "source": SOURCE}
    return [
        {"kind": "points", **common, "target": TARGET},
        {"kind": "points", **common, "target": TARGET, "switches": HEAD_OFF},
        {"kind": "steps", **common, "chunks": [TARGET[:2], TARGET[2:]]},
        {"kind": "rowIds", "package": str(package), "stack": "decoder", "ids": TARGET},
    ]


def expected() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """All points, and the logits with a head off."""
    points: dict[str, np.ndarray] = {}
    reference = Reference(CONFIG, random_weights(CONFIG), inner_points=True)
    reference(np.array([SOURCE]), np.array([TARGET]), tap=points.__setitem__)

    def without(name: str, value: np.ndarray) -> np.ndarray:
        if name == "decoder.layers.1.cross_attention.context":
            value = value.copy()
            value[..., 2 * CONFIG.d_v : 3 * CONFIG.d_v] = 0
        return value

    logits = reference(np.array([SOURCE]), np.array([TARGET]), tap=without)
    return {name: value[0] for name, value in points.items()}, logits[0]


def with_bug(bug: Bug, folder: Path) -> Path:
    for page in PAGES:
        shutil.copytree(ROOT / "export" / page, folder / page)
    script = folder / "explain/live" / bug.file
    text = script.read_text(encoding="utf-8")
    assert text.count(bug.old) == 1, bug
    script.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    """{bug, or "none": what of its scripts is not the reference's}"""
    place = tmp_path_factory.mktemp("bugs")
    model = save_checkpoint(place / "model", CONFIG, random_weights(CONFIG))
    packages = {"none": ROOT / "export"} | {name: with_bug(bug, place / name) for name, bug in BUGS.items()}
    answers = iter(twin.answers([task for package in packages.values() for task in tasks(package, model)]))
    points, head_off = expected()
    found = {}
    for name in packages:
        whole, switched, steps, names = (next(answers) for _ in range(4))
        arrays = twin.arrays(whole)
        pairs = [(point, arrays[point], value) for point, value in points.items()]
        pairs += [
            ("a head off", twin.arrays(switched)["logits"], head_off),
            ("steps", np.array(steps), points["logits"]),
        ]
        found[name] = [point for point, value, true in pairs if not np.allclose(value, true, rtol=1e-12, atol=1e-12)]
        found[name] += ["names of rows"] * (names != TARGET[1:])
    return found


def test_without_a_bug_nothing_differs(differing):
    assert differing["none"] == []


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name, differing):
    assert differing[name]
