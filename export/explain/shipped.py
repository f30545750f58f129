"""The three small models of sentences that ship, and where one looks in them at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.tokenizer import checked_tokenizer
from mlx_transformer.system.errors import UserError

from .payload import live, page_tokenizer

FOLDER = Path(__file__).parent / "models"
TIRED = "The animal didn't cross the street because it was too tired"


def _example(text: str, layer: int, head: int, **find: str) -> dict[str, Any]:
    """Return a text and where one looks in it at first: a layer and a head, counted from 1, that look at something that
    tells, from the last places of these words."""
    return {"text": text, "at": {"layer": layer - 1, "head": head - 1}, "find": find}


MODELS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "sentences": (
        "translate",
        "An encoder-decoder of 2 + 2 layers, 295,936 numbers, that learned English and German sentences of eight "
        "patterns in minutes. It runs in this page, in float64: type, and everything moves.",
        [
            _example(TIRED, 2, 4, word="·it", step="·es"),
            _example(TIRED.replace("tired", "wide"), 2, 4, word="·it", step="·sie"),
            _example("On the river bank", 2, 1, word="·bank", step="·Ufer"),
            _example("YOUR CAT IS A LOVELY CAT", 2, 4, word="·LOVELY", step="·LIEB"),
            _example("The cat sat on the mat", 2, 2, word="·cat", step="·Katze"),
            _example("The mat sat on the cat", 2, 2, word="·cat", step="·Katze"),
            _example("My fried chicken was very good", 2, 4, word="·fried", step="·gebratenes"),
        ],
    ),
    "sentences-decoder": (
        "continue",
        "A decoder alone, 2 layers, 144,256 numbers: it goes on where the text stops, word by word.",
        [
            _example("YOUR CAT IS A LOVELY", 2, 1, step="·CAT"),
            _example("My fried chicken was very", 2, 4, step="·dry"),
            _example("The animal", 2, 3, step="·slow"),
        ],
    ),
    "sentences-encoder": (
        "fill in",
        "An encoder alone, 2 layers, 144,256 numbers: it sees all words at once and says what belongs at ▢.",
        [
            _example("My ▢ chicken was very good", 1, 3, word="▢"),
            _example("YOUR ▢ IS A LOVELY CAT", 1, 1, word="▢"),
            _example("The cat sat on the ▢", 2, 1, word="▢"),
        ],
    ),
}
"""For each folder what it does, what is said of it, and what may be typed: where one looks then, and by which words."""


def shipped() -> list[dict[str, Any]]:
    """Return all of them as the page takes them. `UserError` for a folder that isn't there or is damaged."""
    return [_opened(FOLDER / name, *entry) for name, entry in MODELS.items()]


def _opened(folder: Path, title: str, description: str, examples: list[dict[str, Any]]) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    text = checked_tokenizer(checkpoint)
    tokenizer = None if text is None else page_tokenizer(text)
    if tokenizer is None:
        raise UserError(f"{folder}: has no tokenizer that a page runs; install the package again")
    return live(checkpoint.config, dict(checkpoint.tensors()), tokenizer, title, description, examples)
