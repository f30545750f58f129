"""The three small models of sentences that ship, and where one looks in them at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.system.errors import UserError

from .payload import live, page_tokenizer

FOLDER = Path(__file__).parent / "models"
TIRED = "The animal didn't cross the street because it was too tired"
MODELS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "sentences": (
        "translate",
        "An encoder-decoder of 2 + 2 layers, 295,936 numbers, that learned English and German sentences of eight "
        "patterns in minutes. It runs in this page, in float64: type, and everything moves.",
        [
            {"text": TIRED, "at": {"layer": 1}, "find": {"word": "·it", "step": "·es"}},
            {"text": TIRED.replace("tired", "wide"), "at": {"layer": 1}, "find": {"word": "·it", "step": "·sie"}},
            {"text": "On the river bank", "at": {"layer": 1}, "find": {"word": "·bank", "step": "·Ufer"}},
            {"text": "YOUR CAT IS A LOVELY CAT", "at": {"word": 1}, "find": {}},
            {"text": "The cat sat on the mat", "at": {}, "find": {"word": "·cat"}},
            {"text": "The mat sat on the cat", "at": {}, "find": {"word": "·cat"}},
            {"text": "My fried chicken was very good", "at": {}, "find": {"word": "·chicken"}},
        ],
    ),
    "sentences-decoder": (
        "continue",
        "A decoder alone, 2 layers, 144,256 numbers: it goes on where the text stops, word by word.",
        [
            {"text": text, "at": {"step": 0}}
            for text in ("YOUR CAT IS A LOVELY", "My fried chicken was very", "The animal")
        ],
    ),
    "sentences-encoder": (
        "fill in",
        "An encoder alone, 2 layers, 144,256 numbers: it sees all words at once and says what belongs at ▢.",
        [
            {"text": text, "at": {}, "find": {"word": "▢"}}
            for text in ("My ▢ chicken was very good", "YOUR ▢ IS A LOVELY CAT", "The cat sat on the ▢")
        ],
    ),
}
"""For each folder what it does, what is said of it, and what may be typed: where one looks then, and by which words."""


def shipped() -> list[dict[str, Any]]:
    """Return all of them as the page takes them. `UserError` for a folder that isn't there or is damaged."""
    return [_opened(FOLDER / name, *entry) for name, entry in MODELS.items()]


def _opened(folder: Path, title: str, description: str, examples: list[dict[str, Any]]) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    text = checkpoint.tokenizer_json()
    tokenizer = None if text is None else page_tokenizer(text)
    if tokenizer is None:
        raise UserError(f"{folder}: has no tokenizer that a page runs; install the package again")
    return live(checkpoint.config, dict(checkpoint.tensors()), tokenizer, title, description, examples)
