"""Check that other programs get the checkpoint's token ids from a package's tokenizer files.

transformers, Optimum and sentence-transformers tokenize with the library `tokenizers`, so the check reads the package's
tokenizer.json with it, and with this project's tokenizer. Special tokens in the text are split if tokenizer_config.json
says so. The text: lines in 20 scripts, the model's added tokens within lines, an encoder's prompts, and pairs.

Some vocabularies look ids up apart from the pieces (role "lookup" in `published_ids.py`). Other programs can't read
such a file, so only this project's tokenizer reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.text_embedding import read_embedding
from mlx_transformer.core.tokenizer_files import JOINT, SIDES, side_texts
from mlx_transformer.system.errors import UserError, shortened
from mlx_transformer.system.files import optional_object, read_text
from mlx_transformer.text.added_tokens import added_tokens
from mlx_transformer.text.published_ids import roles_of
from mlx_transformer.text.sentencepiece_tokenizer import is_sentencepiece
from mlx_transformer.text.tokenizer import Tokenizer, is_makers

LINES = (
    "The quick brown fox jumps over the lazy dog; it's 12,345.67 dollars (or 3 %).",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Tôi yêu tiếng nước tôi từ khi mới ra đời.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι.",
    "Все люди рождаются свободными и равными.",
    "כל בני האדם נולדו בני חורין.",
    "يولد جميع الناس أحرارا متساوين في الكرامة.",
    "सभी मनुष्य स्वतंत्र पैदा होते हैं।",
    "সমস্ত মানুষ স্বাধীনভাবে জন্মগ্রহণ করে।",
    "எல்லா மனிதரும் சுதந்திரமாகப் பிறக்கின்றனர்.",
    "అందరు మనుష్యులు స్వతంత్రులుగా పుట్టారు.",
    "ಎಲ್ಲಾ ಮಾನವರೂ ಸ್ವತಂತ್ರರಾಗಿಯೇ ಹುಟ್ಟಿದ್ದಾರೆ.",
    "എല്ലാ മനുഷ്യരും സ്വതന്ത്രരായി ജനിക്കുന്നു.",
    "มนุษย์ทั้งหลายเกิดมามีอิสระ",
    "ყველა ადამიანი იბადება თავისუფალი.",
    "Բոլոր մարդիկ ծնվում են ազատ։",
    "모든 인간은 태어날 때부터 자유롭다.",
    "すべての人間は、生まれながらにして自由である。",
    "人人生而自由，在尊严和权利上一律平等。",
    "የሰው ልጅ ሁሉ ነጻ ሆኖ ይወለዳል።",
    "មនុស្សទាំងអស់កើតមកមានសេរីភាព។",
    "two  spaces , a\ttab 🙂 and <b>marks</b> [x] {y}",
    "a",
)
MANY = 12
"""Most added tokens to try, half of them the first and half the last; a vocabulary may have hundreds."""


def token_problems(opened: Checkpoint, folder: Path) -> list[str]:
    """Compare the ids from a package's tokenizer files with the checkpoint's tokenizer; a line for each wrong file."""
    text = opened.tokenizer_json()
    if text is None:
        return []
    sides = side_texts(text)
    parts = {JOINT: text} if sides is None else {SIDES[side]: each for side, each in sides.items()}
    prompts, problems = tuple(_prompts(opened)), list[str]()
    for name, own in parts.items():
        file = folder / name
        if not file.is_file():
            continue  # `package_files.py` reports it
        try:
            settings = optional_object(folder / "tokenizer_config.json")  # for a joint vocabulary
            splits = name != JOINT or settings.get("split_special_tokens") is True
            difference = _difference(own, read_text(file), splits, prompts, typed=not _fills_masks(opened))
        except (UserError, ValueError) as error:
            difference = f"can't be read ({shortened(str(error))})"
        problems += [f"{name}: {difference}"] if difference else []
    return problems


def lines_of(tokenizer: Tokenizer, prompts: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines to tokenize: `LINES`, lines with the model's added tokens, and lines after each prompt."""
    yield from LINES
    added = tokenizer.source.added
    for i, token in enumerate(added if len(added) <= MANY else [*added[: MANY // 2], *added[-MANY // 2 :]]):
        line = LINES[i % len(LINES)]
        yield from (token.content, f"{line} {token.content} {line}", f"x{token.content}y {token.content}, z")
    for prompt in prompts:
        yield from (prompt + line for line in LINES[:4])


@lru_cache(maxsize=8)
def _difference(own: str, text: str, splits: bool, prompts: tuple[str, ...], typed: bool) -> str | None:
    """Describe the first line with other ids by `text` than by `own`; None if there is none.

    own, text: the tokenizer.json of the checkpoint and of the package. splits: special tokens in a line are split like
    any text. typed: also compare lines in which somebody typed a special token.
    """
    ours, theirs = Tokenizer(own), Tokenizer(text)
    specification = json.loads(text)
    lines = [*lines_of(ours, prompts), *(_typed_roles(json.loads(own)) if typed else ())]
    rows = ours.source.encode_batch(lines)
    for line, expected, found in zip(lines, rows, theirs.source.encode_batch(lines), strict=True):
        if expected != found:
            return f"cuts {shortened(line)!r} into {found[:8]}, the checkpoint into {expected[:8]}"
    if "lookup" in roles_of(specification):
        return None
    library = tokenizers.Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = splits
    for line, expected in zip(lines, rows, strict=True):
        if (found := library.encode(line).ids) != expected:
            return f"is cut by `tokenizers` otherwise: {shortened(line)!r} into {found[:8]}, by us {expected[:8]}"
    pairs = list(zip(LINES[::2], LINES[1::2], strict=False)) if _has_pairs(ours) else []
    for pair, expected in zip(pairs, ours.encode_pairs(pairs) if pairs else (), strict=True):
        if (found := library.encode(*pair).ids) != expected.ids:
            return f"joins {shortened(str(pair))} otherwise by `tokenizers`: {found[:8]}, by us {expected.ids[:8]}"
    return None


def _typed_roles(specification: dict[str, Any]) -> Iterator[str]:
    """Yield lines with special tokens typed as text.

    Nothing for a maker's own file, in which other programs take such text for the token, nor for SentencePiece and
    unigram vocabularies: there `tokenizers` always does, even with `encode_special_tokens`.
    """
    listed = isinstance(specification["model"].get("vocab"), list)
    if is_makers(specification) or is_sentencepiece(specification) or listed:
        return
    for token in [token for token in added_tokens(specification) if token.special][:MANY]:
        yield f"a {token.content} b"


def _fills_masks(opened: Checkpoint) -> bool:
    """Whether a mask in text is the token. Other programs then take every typed special token for the token: they have
    one switch for all (`split_special_tokens`)."""
    return opened.config.architecture == "encoder" and opened.config.head.kind == "vocabulary"


def _has_pairs(tokenizer: Tokenizer) -> bool:
    """Return whether the vocabulary is an encoder's (it has a mask token), so that models may read pairs."""
    return roles_of(json.loads(tokenizer.own_json())).get("mask") is not None


def _prompts(opened: Checkpoint) -> list[str]:
    """Return the prompts of an encoder that gives vectors, from its embedding.json."""
    embedding = read_embedding(opened.folder, opened.config.d_model)
    return [] if embedding is None else [prompt for prompt in embedding.prompts.values() if prompt]
