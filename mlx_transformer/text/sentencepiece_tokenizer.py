"""A SentencePiece model as a `tokenizer.json`, and text cut by one exactly as SentencePiece cuts it.

The file is of standard components: Precompiled, a Replace for spaces, Metaspace, Unigram or BPE. With it alone other
programs differ from SentencePiece where marks stand apart from their letters (`charsmap.py`) and where a text spells a
control piece, such as "</s>", which is then taken for the piece. `ExactText` has neither fault. The remaining
difference: scores are added in float64 where SentencePiece adds in float32, so that segmentations may differ that are
equal to seven digits; of a BPE model two pairs that make the same piece, and that overlap, may be merged in another
order; typed bytes, "<0x41>", are taken for the piece; a text that begins with SentencePiece's own mark, "▁", where the
normaliser leaves that; pieces that users defined, in a BPE model, or where the normaliser changes them.
"""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from mlx_transformer.system.errors import UserError

from .added_tokens import SILENT, WHOLE, AddedToken, Part, Splitter, added_tokens, filler, silencing
from .pairs import Located
from .published_ids import PREFIX, ROLES, TARGET_ONLY, Cut, PublishedIds, roles_of
from .sentencepiece import (
    BPE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Charsmap,
    Piece,
    SentencePiece,
    read_charsmap,
)

SPACES_PATTERN = r" +(?= )|(?<![\s\S]) +|[ ▁]+(?![\s\S])"
"""Spaces before a space, at the beginning and at the end, where SentencePiece strips its own mark too."""
INNER_SPACES_PATTERN = r" +(?= )|[ ▁]+(?![\s\S])"
"""The same, but a space at the beginning stays: it is that of the first word."""
ENDED_SPACES_PATTERN = r" +(?= )"
"""Spaces before a space: one at the end of a text stays."""
WHITE_SPACE = "[\t-\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
"""What separates words, as spaces do, where a published tokenizer says so: all white space but the space itself."""
WHITE_ENDS = rf"(?<![ {WHITE_SPACE[1:]})[ {WHITE_SPACE[1:]}+(?![\s\S])"
"""White space at the end, which goes where a published tokenizer strips a text. What stands before it keeps the time
linear."""
WHITE = {WHITE_SPACE: " ", WHITE_ENDS: ""}
"""{what is replaced: what takes its place}, in normalised text."""
END = "</s>"


def tokenizer_json(
    model: SentencePiece,
    more: Sequence[str] = (),
    roles: Mapping[str, Any] | None = None,
    tokens: Sequence[AddedToken] = (),
    space_each: bool = True,
    ended: bool = False,
    white: str = "",
) -> str:
    """Return the text of a `tokenizer.json` that gives a model's ids, and ends each text with </s>.

    more: control pieces behind the model's own, such as "<pad>". Whoever needs another order of ids gives the pieces in
    that order (`published_ids.laid_out`). roles: what `published_ids` keeps in the file. tokens: those that the maker
    added, behind the pieces or among them. space_each: text behind one of them begins with a space, as a whole text
    does. ended: text ends with a space, where it was typed with one. white: what becomes of white space:
    `WHITE_SPACE` or `WHITE_ENDS`. Raises `UserError` for a vocabulary without </s>, and for tokens whose ids are taken.
    """
    best = max((piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0)
    pieces = [(_text(id, piece), _score(model, piece, best), piece.type) for id, piece in enumerate(model.pieces)]
    pieces += [(text, 0.0, CONTROL) for text in more]
    whole = {token.id: token for token in with_fillers(tokens, [text for text, *_ in pieces])}
    added = [
        AddedToken(id, text).entry(special=type not in (USER_DEFINED, PREFIX))
        for id, (text, _, type) in enumerate(pieces)
        if id not in whole
        and (type in (CONTROL, UNKNOWN, PREFIX) or (type == USER_DEFINED and model.model_type == BPE))
    ]
    known = {token.id for token in tokens}
    added += [token.entry(special=token.id not in known) for token in whole.values()]
    added.sort(key=lambda entry: entry["id"])
    if tokens:
        unsaid = sorted(token.id for token in tokens if token.special)
        roles = {**(roles or {}), WHOLE: sorted(known), **({SILENT: unsaid} if unsaid else {})}
    normalizers: list[dict[str, Any]] = []
    if model.charsmap:
        table = base64.b64encode(model.charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": table})
    if white:
        normalizers.append({"type": "Replace", "pattern": {"Regex": white}, "content": WHITE[white]})
    if model.remove_extra_whitespace:
        pattern = SPACES_PATTERN if space_each or not model.dummy_prefix else INNER_SPACES_PATTERN
        pattern = ENDED_SPACES_PATTERN if ended and pattern == SPACES_PATTERN else pattern
        normalizers.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": ""})
    first = (model.model_type == BPE and model.ids_of(USER_DEFINED)) or not space_each
    scheme = "never" if not model.dummy_prefix else "first" if first else "always"
    inside = any("▁" in piece.text[1:] for piece in model.pieces if piece.type == NORMAL)
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": not inside}
    end = next((id for id, (text, *_) in enumerate(pieces) if text == END), None)
    if end is None:
        raise UserError(f"the vocabulary has no {END}, with which a text ends")
    decoders: list[dict[str, Any]] = [{"type": "ByteFallback"}] if model.byte_fallback else []
    if model.ids_of(TARGET_ONLY):
        decoders.insert(0, {"type": "Replace", "pattern": {"String": " "}, "content": ""})
    decoder = {"type": "Sequence", "decoders": [*decoders, metaspace]} if decoders else metaspace
    silent = [token.content for token in sorted(tokens) if token.special]
    specification = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": END, "type_id": 0}}],
            "pair": [
                {part: {"id": id, "type_id": 0}}
                for name in "AB"
                for part, id in (("Sequence", name), ("SpecialToken", END))
            ],
            "special_tokens": {END: {"id": END, "ids": [end], "tokens": [END]}},
            **({ROLES: dict(roles)} if roles else {}),
        },
        "decoder": silencing(decoder, silent) if silent else decoder,
        "model": _bpe(model, pieces) if model.model_type == BPE else _unigram(model, pieces),
    }
    return json.dumps(specification, ensure_ascii=False, indent=1) + "\n"


def with_fillers(tokens: Sequence[AddedToken], pieces: Sequence[str]) -> list[AddedToken]:
    """Return added tokens by id, and between those behind the pieces one for each row that has none. `UserError` for an
    id or a spelling that another has."""
    by_id = {token.id: token for token in tokens}
    places = {text: id for id, text in enumerate(pieces)}
    for token in tokens:
        taken = pieces[token.id] if token.id < len(pieces) else token.content
        if by_id[token.id] != token or taken != token.content or places.get(token.content, token.id) != token.id:
            raise UserError(f"the added token {token.content!r:.60} has id {token.id}, which is another's")
    behind = range(len(pieces), max(by_id, default=-1) + 1)
    return [by_id.get(id) or filler(id) for id in sorted({*by_id, *behind})]


def sentencepiece_of(specification: dict[str, Any]) -> SentencePiece | None:
    """Return the unigram model of a parsed `tokenizer_json`, without control pieces behind the others; None if it has
    none, or one whose pieces have another order."""
    reordered = is_sentencepiece(specification) and roles_of(specification)
    if reordered or not is_sentencepiece(specification) or specification["model"]["type"] != "Unigram":
        return None
    tables = [each for each in _normalizers(specification) if each["type"] == "Precompiled"]
    control = {each["content"] for each in _added(specification) if each["special"]}
    vocabulary, unknown = specification["model"]["vocab"], specification["model"]["unk_id"]
    types = [
        UNKNOWN if id == unknown else CONTROL if text in control else NORMAL for id, (text, _) in enumerate(vocabulary)
    ]
    last = max(id for id, type in enumerate(types) if type == NORMAL)
    pieces = tuple(Piece(text, score, type) for (text, score), type in zip(vocabulary, types, strict=True))[: last + 1]
    ids = {piece.text: id for id, piece in enumerate(pieces) if piece.type == CONTROL}
    return SentencePiece(
        pieces=pieces,
        byte_fallback=bool(specification["model"].get("byte_fallback")),
        charsmap=base64.b64decode(tables[0]["precompiled_charsmap"]) if tables else b"",
        normalizer="nmt_nfkc" if tables else "identity",
        dummy_prefix=specification["pre_tokenizer"]["prepend_scheme"] != "never",
        remove_extra_whitespace=bool({*patterns_of(specification)} - {WHITE_SPACE, WHITE_ENDS}),
        special=(unknown, ids.get("<s>", -1), ids.get(END, -1), ids.get("<pad>", -1)),
    )


def _text(id: int, piece: Piece) -> str:
    """No text has a space here, they are all replaced: so nothing is cut into an unused piece, nor into one of another
    vocabulary, which is given back without it."""
    return f" unused {id}" if piece.type == UNUSED else f" {piece.text}" if piece.type == TARGET_ONLY else piece.text


def _score(model: SentencePiece, piece: Piece, best: float) -> float:
    """Return a piece that a user defined wins over all ways to cut it, as in SentencePiece."""
    defined = piece.type == USER_DEFINED and model.model_type != BPE
    return len(piece.text) * best - 0.1 if defined else piece.score


def _unigram(model: SentencePiece, pieces: list[tuple[str, float, int]]) -> dict[str, Any]:
    vocabulary = [[text, score] for text, score, _ in pieces]
    (unknown,) = model.ids_of(UNKNOWN)
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": model.byte_fallback}


def _bpe(model: SentencePiece, pieces: list[tuple[str, float, int]]) -> dict[str, Any]:
    """Return the merges, all ways to make a piece of two others, the piece of the highest score first."""
    scores = {text: score for text, score, type in pieces if type in (NORMAL, USER_DEFINED)}
    merges = [
        (-scores[text], i, [text[:i], text[i:]])
        for text in scores
        for i in range(1, len(text))
        if text[:i] in scores and text[i:] in scores
    ]
    (unknown,) = model.ids_of(UNKNOWN)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[unknown][0],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {text: id for id, (text, *_) in enumerate(pieces)},
        "merges": [merge for *_, merge in sorted(merges, key=lambda each: each[:2])],
    }


def is_sentencepiece(specification: dict[str, Any]) -> bool:
    """Return whether a parsed tokenizer.json has the components that `tokenizer_json` writes."""
    normalizer, pre_tokenizer = specification.get("normalizer"), specification.get("pre_tokenizer")
    kinds = ("Precompiled", "Replace", "Lowercase")
    parts = normalizer.get("normalizers") if isinstance(normalizer, dict) else []
    return (
        isinstance(pre_tokenizer, dict)
        and pre_tokenizer.get("type") == "Metaspace"
        and specification["model"].get("type") in ("Unigram", "BPE")
        and isinstance(parts, list)
        and all(isinstance(part, dict) and part.get("type") in kinds for part in parts)
    )


class ExactText:
    """The encoder of a `tokenizer_json`, but for what the file's components get wrong."""

    def __init__(self, specification: dict[str, Any]) -> None:
        """`specification` is the parsed file, of which `tokenizers` has read the text without an error."""
        roles = roles_of(specification)
        tables = [each["precompiled_charsmap"] for each in _normalizers(specification) if each["type"] == "Precompiled"]
        self._table = base64.b64decode(tables[0]) if tables else b""
        self._charsmap: Charsmap | None = None
        kinds = [each["type"] for each in _normalizers(specification)]
        patterns = patterns_of(specification)
        self._white = [(re.compile(each), by) for each, by in WHITE.items() if each in patterns]
        self._lower = tokenizers.normalizers.Lowercase() if "Lowercase" in kinds else None
        self._published = PublishedIds(specification) if "lookup" in roles else None
        self._fixed = _without_faults(specification)
        self._backend = _backend(self._fixed)
        self._before, self._behind = _around(specification)
        whole = {*roles.get(WHOLE, ())}
        self._tokens = [token for token in added_tokens(specification) if token.id in whole]

    @cached_property
    def _typed(self) -> Splitter:
        """Finds added tokens in a text as it was typed."""
        return Splitter([token for token in self._tokens if not token.normalized])

    @cached_property
    def _normal(self) -> Splitter:
        """Finds the others in normalised text."""
        return Splitter([token for token in self._tokens if token.normalized], self._normalized)

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        """Cuts text behind an added token: where a text's first word alone begins with a space, without it."""
        before = self._fixed["pre_tokenizer"]
        if before["prepend_scheme"] != "first":
            return self._backend
        return _backend({**self._fixed, "pre_tokenizer": {**before, "prepend_scheme": "never"}})

    def encodings(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding | Cut]:
        """Return ids and words of each text, </s> included."""
        if self._tokens and (apart := {i for i, text in enumerate(texts) if self._may_split(text)}):
            others = iter(self._plain([text for i, text in enumerate(texts) if i not in apart]))
            return [self._by_parts(text)[0] if i in apart else next(others) for i, text in enumerate(texts)]
        return self._plain(texts)

    def _plain(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding | Cut]:
        """Return the same of texts without added tokens."""
        if self._published is None:
            return self._backend.encode_batch([self._normalized(text) for text in texts])
        parts = [self._published.without_prefix(text) for text in texts]
        rests = [self._normalized(rest) for _, rest in parts]
        encodings = self._backend.encode_batch(rests)
        return [
            self._published.cut(prefix, rest, encoding)
            for (prefix, _), rest, encoding in zip(parts, rests, encodings, strict=True)
        ]

    def _may_split(self, text: str) -> bool:
        return self._typed.may_split(text) or self._normal.may_split(self._normalized(text))

    def _by_parts(self, text: str) -> tuple[Cut, list[tuple[int, int] | None]]:
        """Cut a text between its added tokens; also return where the tokens stand in it."""
        ids, words, places = list(self._before), [None] * len(self._before), [None] * len(self._before)
        word = 0
        for outer in self._typed.parts(text):
            typed = text[outer.start : outer.end]
            normal = self._normalized(typed)
            for part in [Part(outer.id, 0, len(normal))] if outer.id is not None else self._normal.parts(normal):
                cut, spans = self._part(part, normal, first=not outer.start + part.start)
                count = 1 + max((each for each in cut.word_ids if each is not None), default=-1)
                ids += cut.ids
                words += [None if each is None else word + each for each in cut.word_ids]
                origin = spans if normal == typed else self._places(typed, spans)
                places += [None if each is None else (outer.start + each[0], outer.start + each[1]) for each in origin]
                word += count
        after = [None] * len(self._behind)
        return Cut([*ids, *self._behind], [*words, *after]), [*places, *after]

    def _part(self, part: Part, text: str, first: bool) -> tuple[Cut, Sequence[tuple[int, int] | None]]:
        """Return an added token, or the tokens of the text between two. first: the text begins there."""
        if part.id is not None:
            return Cut([part.id], [0]), [(part.start, part.end)]
        rest, prefix = text[part.start : part.end], None
        if self._published is not None:
            prefix, rest = self._published.without_prefix(rest)
        backend = self._backend if first else self._inner
        encoding = backend.encode(rest, add_special_tokens=False)
        spans = [(part.start + start, part.start + end) for start, end in encoding.offsets]
        if self._published is None:
            return Cut(encoding.ids, encoding.word_ids), spans
        cut = self._published.cut(prefix, rest, encoding)
        return cut, [*[None] * (len(cut.ids) - len(spans)), *spans]

    def located(self, texts: Sequence[str]) -> list[Located]:
        """Return ids of each text, </s> included, and the places of its tokens. `UserError` for a vocabulary whose ids
        aren't those of its pieces: only translators have one."""
        if self._published is not None:
            raise UserError("the vocabulary is a translator's: it doesn't say where its tokens stand in a text")
        normalized = [self._normalized(text) for text in texts]
        located_texts = [Located.of(encoding) for encoding in self._backend.encode_batch(normalized)]
        found = [
            each if after == before else Located(each.ids, self._places(before, each.places))
            for before, after, each in zip(texts, normalized, located_texts, strict=True)
        ]
        for i, text in enumerate(texts if self._tokens else ()):
            if self._may_split(text):
                cut, places = self._by_parts(text)
                found[i] = Located(cut.ids, places)
        return found

    def _places(self, text: str, places: Sequence[tuple[int, int] | None]) -> list[tuple[int, int] | None]:
        """Return the same in the text as it was before it was normalised."""
        if self._charsmap is None:  # lower-cased alone: all but a handful of letters keep their places
            return list(places)
        end = len(text)
        lower = text if self._lower is None else self._lower.normalize_str(text)
        known = [*self._charsmap.places(lower), (end, end)]
        return [
            None if place is None else (known[place[0]][0], known[max(place[0], place[1] - 1)][place[0] < place[1]])
            for place in places
        ]

    def _normalized(self, text: str) -> str:
        text = text if self._lower is None else self._lower.normalize_str(text)
        if self._table:
            self._charsmap = self._charsmap or read_charsmap(self._table)
            text = self._charsmap.normalized(text)
        for pattern, by in self._white:
            text = pattern.sub(by, text)
        return text


def _backend(specification: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(specification))
    backend.no_padding()
    backend.no_truncation()
    return backend


def _around(specification: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids that stand before and behind a text."""
    template = specification["post_processor"]
    sides: list[list[int]] = [[], []]
    side = 0
    for part in template["single"]:
        side |= "Sequence" in part
        if "SpecialToken" in part:
            sides[side] += template["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return sides[0], sides[1]


def _without_faults(specification: dict[str, Any]) -> dict[str, Any]:
    """Return the same tokenizer, without its table and changes of white space, and with control pieces that no text can
    spell: they hold a space. Added tokens are found before it is asked."""
    changed = copy.copy(specification)
    roles = roles_of(specification)
    whole = {*roles.get(WHOLE, ())}
    changed["added_tokens"] = [
        x for x in _added(specification) if not x["special"] and not roles.get("prefixes") and x["id"] not in whole
    ]
    control = {x["content"] for x in _added(specification)} - {x["content"] for x in changed["added_tokens"]}
    normalizers = [
        each
        for each in _normalizers(specification)
        if each["type"] != "Precompiled" and each.get("pattern", {}).get("Regex") not in WHITE
    ]
    changed["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
    model = dict(specification["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [[f"{text} " if text in control else text, score] for text, score in model["vocab"]]
        model["vocab"] += roles.get("missing", [])
    return {**changed, "model": model}


def patterns_of(specification: Mapping[str, Any]) -> list[str]:
    """Return the expressions whose matches a parsed tokenizer.json replaces before it cuts text."""
    return [each["pattern"].get("Regex") for each in _normalizers(specification) if each["type"] == "Replace"]


def _normalizers(specification: Mapping[str, Any]) -> list[dict[str, Any]]:
    return (specification.get("normalizer") or {"normalizers": []})["normalizers"]


def _added(specification: dict[str, Any]) -> list[dict[str, Any]]:
    return specification.get("added_tokens") or []
