"""Vocabularies of published models whose ids differ from those of their SentencePiece model.

The ids of its pieces come from vocab.json (Marian, M2M100) or from the family's code (mBART, NLLB); some pieces have
no id. Marian's vocabulary has the pieces of two models: text is split by the source's, and the pieces are looked up
among the ids of both.

Some facts have no key in the format of `tokenizer.json`. They are stored inside its template under "mlx_transformer",
which other programs ignore:

    pad, bos            ids of padding and of the decoder's start token
    eos, unk, mask      ids, for vocabularies of encoders
    lookup              some pieces have no id, or some ids no piece (`PublishedIds`)
    missing             pieces without an id, [text, score]
    prefixes            a text may begin with a token such as ">>deu<<"
    target              the tokenizer.json of the target's model, with the same ids
    as_written          the file's own components split text, as in other programs

`added_tokens.py` has the entries about added tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from mlx_transformer.system.errors import UserError

from .added_tokens import CUT, NORMALIZED, ROLES, SILENT, WHOLE
from .sentencepiece import BPE, BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Piece, SentencePiece

TARGET_ONLY, PREFIX = 7, 8
"""Types of pieces besides SentencePiece's: pieces of the target's model, into which no text is split, and tokens with
which a text may begin, e.g. ">>deu<<"."""
UNK = "<unk>"


def roles_of(specification: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries under "mlx_transformer" in a parsed tokenizer.json; {} if there are none."""
    template = specification.get("post_processor")
    roles = template.get(ROLES) if isinstance(template, dict) else None
    return roles if isinstance(roles, dict) else {}


def target_of(specification: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The parsed tokenizer.json of the target's model; None if both languages use the same."""
    target = roles_of(specification).get("target")
    return target if isinstance(target, dict) and not roles_of(target).get("target") else None


def without_target(specification: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed tokenizer.json without the target's inside."""
    roles = {name: value for name, value in roles_of(specification).items() if name != "target"}
    return {**specification, "post_processor": {**specification["post_processor"], ROLES: roles}}


def problem_of(roles: Mapping[str, Any], size: int) -> str | None:
    """Find a problem with the roles in a tokenizer.json of `size` ids; None if there is none."""
    named = ["pad", "bos", *(name for name in ("eos", "unk", "mask") if name in roles)]
    if not all(type(roles.get(name)) is int and 0 <= roles[name] < size for name in named):
        return f"the ids of {' and '.join(named)} are not in its vocabulary"
    for name in (SILENT, WHOLE, CUT, NORMALIZED):
        ids = roles.get(name, [])
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < size for id in ids):
            return f"{name} has ids that are not in its vocabulary"
    missing = roles.get("missing", [])
    pairs = isinstance(missing, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in missing)
    if not pairs or not all(isinstance(text, str) and type(score) is float for text, score in missing):
        return "its pieces without an id must be [text, score]"
    return None


def laid_out(
    model: SentencePiece, vocabulary: Mapping[str, int], control: Sequence[str] = ()
) -> tuple[SentencePiece, list[list[Any]]]:
    """Put a model's pieces in the order of a vocabulary {token: id}; also returns [text, score] of pieces without an
    id.

    control: tokens that stand for no text. Raises `UserError` for a vocabulary without <unk> or with an id twice, and
    if pieces without an id can't be represented (BPE, bytes, user-defined).
    """
    if UNK not in vocabulary or len(set(vocabulary.values())) < len(vocabulary):
        raise UserError(f"the vocabulary has no {UNK}, or two tokens with the same id")
    texts, own = {id: text for text, id in vocabulary.items()}, {piece.text: piece for piece in model.pieces}
    pieces = tuple(_piece(id, texts.get(id), own, control) for id in range(max(texts) + 1))
    missing = [
        piece
        for piece in model.pieces
        if piece.type in (NORMAL, USER_DEFINED, BYTE) and piece.text not in vocabulary and piece.text not in control
    ]
    if missing and (model.model_type == BPE or any(piece.type != NORMAL for piece in missing)):
        raise UserError(f"{len(missing)} pieces, such as {missing[0].text!r:.40}, have no id in the vocabulary")
    return dataclasses.replace(model, pieces=pieces), [[piece.text, piece.score] for piece in missing]


def _piece(id: int, text: str | None, own: Mapping[str, Piece], control: Sequence[str]) -> Piece:
    if text is None:
        return Piece(f"<unused {id}>", 0.0, CONTROL)
    if text == UNK:
        return Piece(text, 0.0, UNKNOWN)
    if text in control:
        return Piece(text, 0.0, CONTROL)
    if text.startswith(">>") and text.endswith("<<"):  # a language of Marian's
        return Piece(text, 0.0, PREFIX)
    if text in own and own[text].type in (NORMAL, USER_DEFINED, BYTE, UNUSED):
        return own[text]
    return Piece(text, 0.0, CONTROL if text in own else TARGET_ONLY)


class Cut(NamedTuple):
    """Ids of a text, and the number of the word of each; None for </s>."""

    ids: list[int]
    word_ids: list[int | None]


class PublishedIds:
    """Looks up pieces in the vocabulary, as `transformers` does, for a tokenizer.json with the entry "lookup"."""

    def __init__(self, specification: Mapping[str, Any]) -> None:
        vocabulary, added = specification["model"]["vocab"], specification.get("added_tokens") or []
        texts = list(vocabulary) if isinstance(vocabulary, dict) else [text for text, _ in vocabulary]
        prefixes = {x["content"]: x["id"] for x in added if not x["special"]}
        self._prefixes = prefixes if roles_of(specification).get("prefixes") else None
        self._unknown, self._size = texts.index(UNK), len(texts)
        whole = {*roles_of(specification).get(WHOLE, ())}
        self._surfaces = {text[1:]: id for id, text in enumerate(texts) if text.startswith(" ")}
        # Text that the model doesn't know may also spell an added token.
        self._surfaces |= {x["content"]: x["id"] for x in added if x["id"] in whole}

    def without_prefix(self, text: str) -> tuple[int | None, str]:
        """Split off a token such as ">>deu<<" at the beginning of a text; returns (its id, the rest). The id is <unk>'s
        for an unknown token, and None without a token."""
        if self._prefixes is None or not text.startswith(">>") or (end := text.find("<<") + 2) < 2:
            return None, text
        return self._prefixes.get(text[:end], self._unknown), text[end:]

    def cut(self, prefix: int | None, text: str, encoding: tokenizers.Encoding) -> Cut:
        """Map the pieces of the source's model to ids. Text unknown to it may be a piece of the target's; a piece
        without an id becomes <unk>."""
        first = [] if prefix is None else [prefix]
        ids = [self._id(id, text, place) for id, place in zip(encoding.ids, encoding.offsets, strict=True)]
        words = [None if word is None else word + len(first) for word in encoding.word_ids]
        return Cut([*first, *ids], [*(0 for _ in first), *words])

    def _id(self, id: int, text: str, place: tuple[int, int]) -> int:
        if id == self._unknown:
            return self._surfaces.get(text[slice(*place)], id)
        return id if id < self._size else self._unknown
