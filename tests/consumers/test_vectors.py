"""Optimum, sentence-transformers and transformers.js load the folder of an encoder of texts unchanged, and the
WebAssembly build of ONNX Runtime its one file: vectors are the reference's by the rule, those of long texts too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from word_pieces import MOST, write_encoder

from export import OnnxTransformer, export_onnx, export_search
from export.validate.reference.layers import sentence_vectors
from export.validate.reference.network import Reference
from export.validate.rule import budget_for
from mlx_transformer.convert import to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.text_embedding import TextEmbedding

pytestmark = pytest.mark.consumers

TEXTS = [*cases.TEXTS[:14], "one text ", "and a longer one, of more words than it", "日本語 " * 20, "a film"]
WAYS = {
    "optimum": ["vectors", "sentence vectors", "sentence torch", "sentence cut there", "sentence cut here"],
    "transformers.js": ["vectors", "text vectors"],
}
FEWER = 16
"""Numbers of a vector that is cut, by sentence-transformers or by the export."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def ask(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    folder = export_onnx(checkpoint, checkpoint.parent / "onnx")
    file = export_search(checkpoint, checkpoint.parent / "encoder.onnx", text=True)
    cut = export_onnx(checkpoint, checkpoint.parent / "cut", dimensions=FEWER)
    published = to_huggingface(checkpoint, checkpoint.parent / "published")
    of_folder = dict(folder=str(folder), texts=TEXTS)
    by_sentences = dict(kind="sentence_vectors", texts=TEXTS)
    tasks: list[dict[str, Any]] = [
        dict(name="vectors", kind="vectors", **of_folder),
        dict(name="sentence vectors", **by_sentences, folder=str(folder)),
        dict(name="sentence torch", **by_sentences, folder=str(published), backend="torch"),
        dict(name="sentence cut there", **by_sentences, folder=str(folder), dimensions=FEWER),
        dict(name="sentence cut here", **by_sentences, folder=str(cut)),
        dict(name="text vectors", kind="text_vectors", file=str(file), texts=TEXTS),
    ]
    answers = {name: cases.run(name, tasks, tmp_path_factory.mktemp(name)) for name in WAYS}
    return lambda consumer, name: answers[consumer][name]


def by_reference(checkpoint: Path, dtype: str, without_end: bool, dimensions: int | None) -> np.ndarray:
    """The vectors, in NumPy, of each text by itself. without_end: of one that is too long the last token, [SEP], is cut
    off too, as transformers.js does. dimensions: so many numbers, at length 1 again."""
    opened = open_checkpoint(checkpoint)
    model = Reference(opened.config, dict(opened.tensors()), np.dtype(dtype))
    found = []
    embedder = OnnxTransformer(checkpoint.parent / "onnx", threads=1).embedder()
    for row, whole in zip(embedder.rows(TEXTS), embedder.tokenizer.encode_batch(TEXTS), strict=True):
        row = whole[:MOST] if without_end else row
        real = np.ones((1, len(row)), bool)
        memory = model.encode(np.array([row]))
        vector = sentence_vectors(TextEmbedding(), memory, real)[0][:dimensions]
        found.append(vector / np.linalg.norm(vector))
    return np.array(found)


@pytest.mark.parametrize(("consumer", "way"), [(name, way) for name, ways in WAYS.items() for way in ways])
def test_vectors_are_the_reference_s_by_the_rule(
    checkpoint: Path, ask: Callable[[str, str], Any], consumer: str, way: str
) -> None:
    answer = ask(consumer, way)
    assert "error" not in answer, answer["error"]
    without_end, dimensions = (consumer, way) == ("transformers.js", "vectors"), FEWER if "cut" in way else None
    truth, narrow = (by_reference(checkpoint, dtype, without_end, dimensions) for dtype in ("float64", "float32"))
    budget, unit = budget_for("float32", "cpu"), 2.0**-24
    error, rounding = np.array(answer["value"], np.float64) - truth, narrow - truth
    floor = unit * np.sqrt((truth**2).mean())
    assert np.sqrt((error**2).mean()) <= budget.rms * max(np.sqrt((rounding**2).mean()), floor)
    assert np.abs(error).max() <= budget.max * max(np.abs(rounding).max(), floor)
