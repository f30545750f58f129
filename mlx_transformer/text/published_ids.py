"""Vocabularies of published models whose ids aren't those of their SentencePiece model.

A vocab.json gives the ids (Marian and M2M100), or the family's code does (mBART, NLLB). The model says what a piece is;
which id it has, and that it has none, the vocabulary. Marian's holds pieces of two models: text is cut by the source's,
and ids may be of either.

The token that a `tokenizer.json` has no place for is kept inside its template, where other programs pass over it, as
"mlx_transformer": the ids of pad and of what decoders start with; the pieces without an id; whether a text may begin
with a token such as ">>deu<<"; and of a vocabulary of two models the tokenizer.json of the target's, with the same ids.
Vocabularies of encoders have the ids of eos, unk and mask there too, and that the file's own components cut text, as
they do in other programs ("as_written"). What is said of tokens that a maker added stands in `added_tokens.py`.
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
"""Types of pieces beside SentencePiece's own: what no text is cut into, and what a text may begin with, whole."""
UNK = "<unk>"


def roles_of(specification: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a parsed tokenizer.json says beside its standard components; {} if it says nothing."""
    template = specification.get("post_processor")
    roles = template.get(ROLES) if isinstance(template, dict) else None
    return roles if isinstance(roles, dict) else {}


def target_of(specification: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the parsed tokenizer.json that cuts text of the target; None where the same does."""
    target = roles_of(specification).get("target")
    return target if isinstance(target, dict) and not roles_of(target).get("target") else None


def without_target(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Return what cuts text of the source alone."""
    roles = {name: value for name, value in roles_of(specification).items() if name != "target"}
    return {**specification, "post_processor": {**specification["post_processor"], ROLES: roles}}


def problem_of(roles: Mapping[str, Any], size: int) -> str | None:
    """Return what is wrong with what a file of `size` ids says, if anything is."""
    named = ["pad", "bos", *(name for name in ("eos", "unk", "mask") if name in roles)]
    if not all(type(roles.get(name)) is int and 0 <= roles[name] < size for name in named):
        return f"the ids of {' and '.join(named)} are none of its own"
    for name in (SILENT, WHOLE, CUT, NORMALIZED):
        ids = roles.get(name, [])
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < size for id in ids):
            return f"{name} are no ids of its own"
    missing = roles.get("missing", [])
    pairs = isinstance(missing, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in missing)
    if not pairs or not all(isinstance(text, str) and type(score) is float for text, score in missing):
        return "its pieces without an id are no [text, score]"
    return None


def laid_out(
    model: SentencePiece, vocabulary: Mapping[str, int], control: Sequence[str] = ()
) -> tuple[SentencePiece, list[list[Any]]]:
    """Return the model with its pieces in the vocabulary's order, and [text, score] of those without an id.

    control: tokens of the vocabulary that stand for no text. Raises `UserError` for ids that are no order.
    """
    if UNK not in vocabulary or len(set(vocabulary.values())) < len(vocabulary):
        raise UserError(f"the vocabulary has no {UNK}, or two tokens of one id")
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
    if text.startswith(">>") and text.endswith("<<"):  # what Marian calls a language, such as ">>deu<<"
        return Piece(text, 0.0, PREFIX)
    if text in own and own[text].type in (NORMAL, USER_DEFINED, BYTE, UNUSED):
        return own[text]
    return Piece(text, 0.0, CONTROL if text in own else TARGET_ONLY)


class Cut(NamedTuple):
    """A text's ids, and for each the number of its word; None of </s>."""

    ids: list[int]
    word_ids: list[int | None]


class PublishedIds:
    """From what the source's model makes of a text to the vocabulary's ids, as `transformers` looks them up: of a
    tokenizer.json in which not each piece has an id, or not each id a piece ("lookup" among its roles)."""

    def __init__(self, specification: Mapping[str, Any]) -> None:
        vocabulary, added = specification["model"]["vocab"], specification.get("added_tokens") or []
        texts = list(vocabulary) if isinstance(vocabulary, dict) else [text for text, _ in vocabulary]
        prefixes = {x["content"]: x["id"] for x in added if not x["special"]}
        self._prefixes = prefixes if roles_of(specification).get("prefixes") else None
        self._unknown, self._size = texts.index(UNK), len(texts)
        whole = {*roles_of(specification).get(WHOLE, ())}
        self._surfaces = {text[1:]: id for id, text in enumerate(texts) if text.startswith(" ")}
        # An added token may also be what the model doesn't know of a text.
        self._surfaces |= {x["content"]: x["id"] for x in added if x["id"] in whole}

    def without_prefix(self, text: str) -> tuple[int | None, str]:
        """Return the id of the token that a text begins with, <unk> for one that isn't there, and the rest."""
        if self._prefixes is None or not text.startswith(">>") or (end := text.find("<<") + 2) < 2:
            return None, text
        return self._prefixes.get(text[:end], self._unknown), text[end:]

    def cut(self, prefix: int | None, text: str, encoding: tokenizers.Encoding) -> Cut:
        """Return the ids of a text that was cut. Text that the source's model doesn't know the target's may; what has
        no id is unknown."""
        first = [] if prefix is None else [prefix]
        ids = [self._id(id, text, place) for id, place in zip(encoding.ids, encoding.offsets, strict=True)]
        words = [None if word is None else word + len(first) for word in encoding.word_ids]
        return Cut([*first, *ids], [*(0 for _ in first), *words])

    def _id(self, id: int, text: str, place: tuple[int, int]) -> int:
        if id == self._unknown:
            return self._surfaces.get(text[slice(*place)], id)
        return id if id < self._size else self._unknown
