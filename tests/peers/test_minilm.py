"""all-MiniLM-L6-v2, imported and exported to every target: the ids of its own tokenizer, and the vectors and neighbours
that `transformers` gives it in float64."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from pathlib import Path
from typing import Any

import minilm
import numpy as np
import onnxruntime as ort
import pytest
import tokenizers
from hard_text import hard_lines
from numpy.typing import NDArray

from export import OnnxTransformer, export_onnx, export_search
from export.package.quality import nearest, recorded
from export.search import open_file
from export.validate.rule import budget_for
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.text_embedding import TextEmbedding, read_embedding
from mlx_transformer.families.sentence_folder import read_sentence_folder

pytestmark = pytest.mark.consumers

GOLDEN: dict[str, Any] = json.loads(minilm.GOLDEN.read_text())
SHOWN = np.array(GOLDEN["embeddings"])
ALL = slice(None)
BY_LENGTH = sorted(range(len(minilm.LINES)), key=lambda i: len(minilm.LINES[i]))
"""For batches that hold little padding."""
TIE = 1e-6
"""Cosines that are nearer than that may change places in float32."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("minilm") / "checkpoint"
    assert import_huggingface(minilm.folder(), out) == [
        "tokenizer.json ends texts after 128 tokens, sentence_bert_config.json after 256, which counts"
    ]
    return out


def check_numbers(vectors: NDArray, lines: slice = ALL) -> None:
    """Vectors of these lines are float64's within the rule's multiples of what float32 in PyTorch is off by."""
    budget = budget_for("float32", "cpu")
    error = vectors[:, : SHOWN.shape[1]].astype(np.float64) - SHOWN[lines]
    assert np.sqrt((error**2).mean()) <= budget.rms * GOLDEN["float32"]["rms"]
    assert np.abs(error).max() <= budget.max * GOLDEN["float32"]["max"]


def check(vectors: NDArray) -> None:
    """So are those of all lines, and the ten nearest to each."""
    check_numbers(vectors)
    found = zip(nearest(vectors), GOLDEN["neighbours"], GOLDEN["gaps"], strict=True)
    clear = [set(ours.tolist()) == set(theirs) for ours, theirs, gap in found if gap > TIE]
    assert all(clear)
    assert len(clear) > 0.7 * len(vectors)  # lines that hold nothing it knows have one vector


def test_the_weights_are_those_of_the_golden_numbers() -> None:
    weights = (minilm.folder() / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == GOLDEN["sha256"]


def test_how_vectors_are_made(checkpoint: Path) -> None:
    found = read_embedding(checkpoint, 384)
    assert found == TextEmbedding(pooling=["mean"], dense=[], normalize=True, max_length=256)


def test_ids_are_its_own_tokenizer_s_in_every_line(checkpoint: Path) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(minilm.folder() / "tokenizer.json"))
    theirs.no_padding()
    theirs.enable_truncation(256)
    embedder = Transformer.load(checkpoint).embedder()
    hard = [line for kind, lines in hard_lines().items() if kind != "control pieces" for line in lines]
    lines = [*minilm.LINES, *hard]
    assert embedder.rows(lines) == [each.ids for each in theirs.encode_batch([line.strip() for line in lines])]


def test_lines_are_of_every_length_in_twenty_scripts(checkpoint: Path) -> None:
    lengths = [len(row) for row in Transformer.load(checkpoint).embedder().rows(minilm.LINES)]
    assert set(lengths) == set(range(2, 257))
    words = ["".join(filter(str.isalpha, line)) for line in minilm.LINES]
    scripts = {unicodedata.name(letter).split()[0] for word in words for letter in word}
    assert len(minilm.LINES) >= 1000
    assert len(scripts) >= 20


def test_mlx(checkpoint: Path) -> None:
    check(Transformer.load(checkpoint).embed(minilm.LINES))


@pytest.mark.parametrize("target", ["portable", "cpu", "web"])
def test_each_target(checkpoint: Path, target: str, tmp_path: Path) -> None:
    model = OnnxTransformer(export_onnx(checkpoint, tmp_path / "onnx", target=target))
    vectors = model.embed(minilm.LINES)
    check(vectors)
    for i in range(0, len(vectors), 100):
        np.testing.assert_array_equal(model.embed(minilm.LINES[i]), vectors[i])


@pytest.fixture(scope="module")
def one_file(checkpoint: Path) -> Path:
    return export_search(checkpoint, checkpoint.parent / "minilm.onnx", text=True)


def test_one_file_by_onnx_runtime_as_it_is(one_file: Path) -> None:
    session = ort.InferenceSession(one_file, providers=["CPUExecutionProvider"])
    vectors = np.zeros((len(minilm.LINES), 384))
    for i in range(0, len(BY_LENGTH), 16):
        part = BY_LENGTH[i : i + 16]
        text = np.array([minilm.LINES[place] for place in part], object)
        vectors[part] = np.asarray(session.run(["sentence_embedding"], {"text": text})[0])
    check(vectors)
    some = slice(None, None, 25)
    check_numbers(open_file(one_file).embed(minilm.LINES[some]), some)


def test_one_file_in_web_assembly(one_file: Path, tmp_path: Path) -> None:
    texts = [minilm.LINES[i] for i in BY_LENGTH]
    vectors = np.zeros((len(texts), 384))
    vectors[BY_LENGTH] = minilm.in_node(dict(kind="text_vectors", file=str(one_file), texts=texts, batch=8), tmp_path)
    check(vectors)


def test_what_must_not_pass(checkpoint: Path) -> None:
    model, some = Transformer.load(checkpoint), slice(None, None, 25)
    lines = minilm.LINES[some]
    check_numbers(model.embed(lines), some)
    wrong = {"the first row": {"pooling": "cls"}, "no norm": {"normalize": False}, "a prompt": {"prompt": "query: "}}
    for options in wrong.values():
        with pytest.raises(AssertionError):
            check_numbers(model.embed(lines, **options), some)
    model.text_embedding = TextEmbedding(normalize=True, max_length=128)  # as tokenizer.json would have it
    with pytest.raises(AssertionError):
        check_numbers(model.embed(lines), some)


def test_sixteen_bits_keep_its_neighbours(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "lines"
    text.write_text("".join(f"{line}\n" for line in minilm.LINES), encoding="utf-8")
    export_onnx(checkpoint, tmp_path / "onnx", precision="float16", gate_source=text, accept_loss=True)
    (quality,) = recorded(tmp_path / "onnx")
    assert quality.neighbours
    assert 0.98 < quality.agreement <= 1


def test_it_is_written_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    to_huggingface(checkpoint, tmp_path / "back")
    assert "SentenceTransformer(" in (tmp_path / "back" / "README.md").read_text(encoding="utf-8")
    assert "model.embed(" in (checkpoint / "README.md").read_text(encoding="utf-8")
    found, was = read_sentence_folder(tmp_path / "back"), read_sentence_folder(minilm.folder())
    assert found.embedding == was.embedding
    import_huggingface(tmp_path / "back", tmp_path / "again")
    ours, again = (Transformer.load(folder).embed(minilm.LINES[:30]) for folder in (checkpoint, tmp_path / "again"))
    np.testing.assert_array_equal(ours, again)
