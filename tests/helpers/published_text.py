"""Small folders of published translators, with the vocabularies that their makers ship, trained on names."""

from __future__ import annotations

import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from hard_text import hard_lines, names
from small_models import random_weights

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.families.engine import exported
from mlx_transformer.families.folder import write_folder
from mlx_transformer.families.table import FAMILIES

STACKS: dict[str, Any] = dict(
    **dict(d_model=8, encoder_layers=1, decoder_layers=1, max_position_embeddings=64, tie_word_embeddings=True),
    **dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8),
)
CONTROL = ("<s>", "</s>", "<pad>", "<unk>")
T5: dict[str, Any] = dict(d_model=8, d_kv=4, num_heads=2, d_ff=8, num_layers=1, num_decoder_layers=1)


def write_model(folder: Path, values: dict[str, Any], **files: Any) -> Path:
    """A random model of a published config, and files beside it: bytes, text, or what is written as JSON. A file's name
    has "__" for its point."""
    family = FAMILIES[values["model_type"]]
    fields, problems = family.read_config(values, {})
    assert not problems
    config = TransformerConfig.from_dict(fields)
    published, weights = exported(family, config, random_weights(config).items(), folder)
    write_folder(folder, config, (published, weights), None, {}, "")
    for name, contents in files.items():
        data = contents if isinstance(contents, bytes) else contents.encode() if isinstance(contents, str) else None
        path = folder / name.replace("__", ".")
        path.write_bytes(json.dumps(contents, ensure_ascii=False).encode() if data is None else data)
    return folder


def trained(lines: list[str], size: int = 700, **options: Any) -> bytes:
    """A SentencePiece model of these lines; ids as its trainer gives them, unless told otherwise."""
    file = io.BytesIO()
    settings = dict(vocab_size=size, character_coverage=0.98, minloglevel=2, hard_vocab_limit=False)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=file, **{**settings, **options}
    )
    return file.getvalue()


@cache
def judge_of(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def stripped(lines: list[str]) -> list[str]:
    """Lines without U+0085 at their end: SentencePiece's table leaves it, and transformers strips a text."""
    return [re.sub(r"[\s\x00-\x1f\x7f-\x9f\u200b-\u200f\ufeff]+\Z", "", line) for line in lines]


def two_languages() -> tuple[list[str], list[str]]:
    """Lines of two sides whose letters differ in part."""
    lines = names(60, 40)
    return lines[:700], lines[500:1300]


def text_pieces(model: bytes) -> list[str]:
    """All pieces but control pieces and the unknown."""
    judge = judge_of(model)
    return [judge.id_to_piece(i) for i in range(len(judge)) if not judge.is_control(i) and not judge.is_unknown(i)]


def lines() -> list[str]:
    """Hard ones, two thousand."""
    return [line for each in hard_lines(count=60).values() for line in each[:2500:3]]


def looked_up(pieces: list[str], vocabulary: dict[str, int]) -> list[int]:
    """Ids of pieces, and of </s> behind them. A text that spells a control piece is text, here; `transformers` takes it
    for the piece."""
    unknown = vocabulary["<unk>"]
    return [unknown if p in CONTROL else vocabulary.get(p, unknown) for p in pieces] + [vocabulary["</s>"]]
