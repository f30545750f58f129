"""Small models of every kind and how each is exported, for tests of the files around the graphs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from adapter_models import kept
from head_models import head_model
from marian_models import STUDENT, write_model
from small_models import DECODER, SIZES, random_weights
from word_pieces import tokenizer, write_bert

from export import export_onnx, export_search
from export.search.triton import export_triton
from mlx_transformer.convert import import_marian
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.core.text_embedding import Dense, TextEmbedding
from mlx_transformer.core.tokenizer_files import join_texts
from mlx_transformer.text.tokenizer import Tokenizer

LINES = ["one two three. four five six! größer 東京 " * 3]
SETTINGS = {"beam": 3, "length_penalty": 0.7, "max_new_tokens": 20, "suppressed": [5, 0], "end_ids": [2, 7]}
LANGUAGES = {"languages": {"de": 7, "zh": 9}, "forced_first": [7], "source_language_last": True}


def pair(folder: Path, settings: dict[str, Any] | None = None, text: str | None = None, **changes: Any) -> Path:
    text = text or Tokenizer.train(LINES, vocab_size=280).to_json()
    known = Tokenizer(text)
    sizes = {**SIZES, "vocab_size": known.vocab_size, "source_vocab_size": known.source.vocab_size}
    config = TransformerConfig(**{**sizes, "encoder_layers": 1, "decoder_layers": 1, **changes})
    texts = {"generation.json": json.dumps(settings)} if settings else {}
    return save_checkpoint(folder / "model", config, random_weights(config), text, texts=texts, force=True)


def each(folder: Path) -> Path:
    one, other = (Tokenizer.train(LINES, vocab_size=size).to_json() for size in (270, 280))
    return pair(folder, text=join_texts(one, other), tie_embeddings="target-output")


def vectors(folder: Path) -> Path:
    rng, width = np.random.default_rng(0), 32
    weights = {"dense.0.weight": (12, 2 * width), "dense.0.bias": (12,), "sparse.weight": (1, width)}
    weights |= {"sparse.bias": (1,), "multi.weight": (4, width), "multi.bias": (4,)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    embedding = TextEmbedding(
        pooling=("cls", "mean"), normalize=True, max_length=20, lower_case=True, similarity="dot", sparse=True, multi=4,
        prompts={"query": "q: ", "text": "t: "}, default_prompt="text", dense=(Dense(width=12),), weights=arrays,
    )  # fmt: skip
    return write_bert(folder / "model", tokenizer(folder / "words"), embedding)


def student(folder: Path) -> Path:
    import_marian(write_model(folder / "marian", STUDENT, integers=True), folder / "model")
    return folder / "model"


def calibrated(folder: Path) -> dict[str, Any]:
    (folder / "text").write_text("one two three.\nfour five six!\n" * 4, encoding="utf-8")
    return dict(precision=["float32", "int8"], calibrate=folder / "text", int8_scales="fixed", accept_loss=True) | dict(
        gate_source=folder / "text"
    )


def listed(folder: Path) -> dict[str, Any]:
    """A shortlist that the export is given, in place of the model's own."""
    own = json.loads((folder / "model" / "generation.json").read_text(encoding="utf-8"))["shortlist"]
    shutil.copy(folder / "model" / own, folder / "given")
    return dict(shortlist=folder / "given", target="cpu", precision="int8")


Options = dict[str, Any] | Callable[[Path], dict[str, Any]]
PACKAGES: dict[str, tuple[Callable[[Path], Path], Options]] = {
    "encoder-decoder": (lambda f: pair(f, SETTINGS), {}),
    "languages, on the web": (lambda f: pair(f, LANGUAGES), dict(target="web", precision=["int8-weights", "int4"])),
    "two vocabularies": (each, dict(target="cpu", attention=True)),
    "decoder": (lambda f: pair(f, **DECODER), {}),
    "decoder in int4": (lambda f: pair(f, **DECODER), dict(precision="int4", activations="float32", target="cuda")),
    "vectors, cut": (vectors, dict(dimensions=7)),
    "vectors, for cpu": (vectors, dict(target="cpu", inputs_embeds=True)),
    "classes": (lambda f: head_model("bert-classes", f), dict(precision=["float32", "float16"])),
    "classes of tokens": (lambda f: head_model("bert-tokens", f), dict(target="cpu")),
    "an imported student": (student, dict(precision=["float32", "int8"])),
    "a given shortlist": (student, listed),
    "no shortlist": (student, dict(shortlist="none", target="web")),
    "calibrated": (pair, calibrated),
    "an adapter": (lambda f: kept(f, "lora", Scheme(32, 4)), dict(precision="packed")),
}  # fmt: skip
FILES: dict[str, tuple[Callable[[Path], Path], Options]] = {
    "one file": (lambda f: pair(f, SETTINGS), dict(attention=True)),
    "one file of a student": (student, dict(precision="int8", target="cpu")),
    "one file with a given shortlist": (student, listed),
    "one file in int4": (lambda f: pair(f, LANGUAGES), dict(precision="int4", external=True)),
}
"""With the search inside."""


def write_package(name: str, folder: Path) -> tuple[Path, Path]:
    """Write one of `PACKAGES` or `FILES`, or "triton": its checkpoint, and the folder or file that is exported."""
    checkpoint, options = (PACKAGES | FILES)["one file" if name == "triton" else name]
    model = checkpoint(folder)
    options = options(folder) if callable(options) else options
    if name == "triton":
        return model, export_triton(model, folder / "triton", **options) / "1" / "model.onnx"
    if name in FILES:
        return model, export_search(model, folder / "m.onnx", **options, force=True)
    return model, export_onnx(model, folder / "onnx", **options, force=True)
