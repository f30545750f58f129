"""A SentencePiece model as a `tokenizer.json`, and `ExactText`, which splits text by that file as SentencePiece does.

The file has standard components: Precompiled, a Replace for spaces, Metaspace, Unigram or BPE. Programs that use only
these differ from SentencePiece in combining marks apart from their letters, and in texts that spell a control piece,
e.g. "</s>", which they take for the piece. `ExactText` handles both. It still differs from SentencePiece in

    Unigram models          if two segmentations score alike to seven digits: SentencePiece adds scores in float32,
                            `tokenizers` in float64
    BPE models              the order of merges if overlapping pairs form the same piece; user-defined pieces
    typed bytes             "<0x41>" is taken for the piece
    a leading "▁"           SentencePiece's mark at the start of a text, if the normalizer leaves it
    user-defined pieces     if the normalizer changes them
"""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from mlx_transformer.system.errors import UserError

from .added_tokens import (
    CUT,
    NORMALIZED,
    SILENT,
    WHOLE,
    WORDS_FIRST,
    AddedToken,
    Part,
    PythonSplitter,
    Splitter,
    added_tokens,
    filler,
    mark_of,
    silencing,
)
from .pairs import Located
from .published_ids import PREFIX, ROLES, TARGET_ONLY, UNK, Cut, PublishedIds, roles_of
from .sentencepiece import (
    BPE,
    BYTE,
    BYTES,
    CONTROL,
    NORMAL,
    UNIGRAM,
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
"""The same, but a space at the beginning stays: it belongs to the first word."""
ENDED_SPACES_PATTERN = r" +(?= )"
"""Spaces before a space: a last space stays at the end of a text."""
WHITE_SPACE = "[\t-\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
"""All white space but U+0020. Some published tokenizers treat it as a space."""
WHITE_ENDS = rf"(?<![ {WHITE_SPACE[1:]})[ {WHITE_SPACE[1:]}+(?![\s\S])"
"""White space at the end, for published tokenizers that strip texts. The look-behind keeps the matching linear."""
RUNS_OF_SPACES = " {2,}"
MARKED_END = r"[ ▁]+(?![\s\S])"
"""Spaces at the end, with SentencePiece's own mark."""
OF_SPACES: dict[str, dict[str, str]] = {
    "own": {SPACES_PATTERN: ""},
    "ends": {WHITE_ENDS: "", RUNS_OF_SPACES: "▁", MARKED_END: ""},
    "words": {WHITE_ENDS: "", RUNS_OF_SPACES: "▁", WHITE_SPACE: " ", MARKED_END: ""},
    "split": {WHITE_SPACE: " ", MARKED_END: ""},
    "kept": {ENDED_SPACES_PATTERN: ""},
}
"""Ways to change spaces, as {pattern in normalised text: replacement}, applied in this order.

own      as SentencePiece does
ends     as transformers 4 does
words    as Pegasus of transformers 4 does: white space separates words
split    as T5 and mBART of transformers 5 do: likewise
kept     as tokenizers that keep a space at the end
"""
WORDS = ("words", "split")
WHITE = {WHITE_SPACE: " ", WHITE_ENDS: ""}
"""Replacements of `ExactText` itself, before `tokenizers` gets the text."""
END = "</s>"
Place = tuple[int, int] | None
"""A token's (start, end) in a text, in characters; None for a token without text, e.g. </s>."""


def tokenizer_json(
    model: SentencePiece,
    more: Sequence[str] = (),
    roles: Mapping[str, Any] | None = None,
    tokens: Sequence[AddedToken] = (),
    space_each: bool = True,
    spaces: str = "own",
) -> str:
    """Make a `tokenizer.json` with the model's ids; it ends each text with </s>.

    The order of `model.pieces` is the order of ids; `published_ids.laid_out` changes it. more: control pieces after the
    model's, e.g. "<pad>". roles: entries under "mlx_transformer" (`published_ids`). tokens: the maker's added tokens;
    their ids may be those of pieces with the same text. space_each: put a space before the text after an added token,
    as before a whole text. spaces: a key of `OF_SPACES`. Raises `UserError` for a vocabulary without </s>, and for
    added tokens whose ids are taken.
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
    typed = bool(roles and roles.get("strips"))  # transformers' Python tokenizers look for all tokens in typed text
    shown = [token._replace(normalized=token.normalized and not typed) for token in whole.values()]
    added += [token.entry(special=token.id not in known) for token in shown]
    added.sort(key=lambda entry: entry["id"])
    if tokens:
        unsaid = sorted(token.id for token in tokens if token.special)
        cut = [id for id in sorted(known) if id < len(model.pieces) and model.pieces[id].type == NORMAL]
        normalized = sorted(token.id for token in tokens if token.normalized and typed)
        listed = {WHOLE: sorted(known), CUT: cut, NORMALIZED: normalized, SILENT: unsaid}
        roles = {**(roles or {}), **{name: ids for name, ids in listed.items() if ids}}
    normalizers: list[dict[str, Any]] = []
    if model.charsmap:
        table = base64.b64encode(model.charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": table})
    normalizers += [
        {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
        for pattern, content in OF_SPACES[spaces].items()
        if model.remove_extra_whitespace or pattern in WHITE
    ]
    first = (model.model_type == BPE and model.ids_of(USER_DEFINED)) or not space_each
    scheme = "never" if not model.dummy_prefix else "first" if first else "always"
    inside = any("▁" in piece.text[1:] for piece in model.pieces if piece.type == NORMAL)
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": not inside}
    end = next((id for id, (text, *_) in enumerate(pieces) if text == END), None)
    if end is None:
        raise UserError(f"the vocabulary has no {END}, which must end each text")
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
        "pre_tokenizer": metaspace
        if spaces not in WORDS
        else {"type": "Sequence", "pretokenizers": [WORDS_FIRST, metaspace]},
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
    """Sort added tokens by id, with a filler for each unused id after the pieces. Raises `UserError` if another token
    has the same id or spelling."""
    by_id = {token.id: token for token in tokens}
    places = {text: id for id, text in enumerate(pieces)}
    for token in tokens:
        taken = pieces[token.id] if token.id < len(pieces) else token.content
        if by_id[token.id] != token or taken != token.content or places.get(token.content, token.id) != token.id:
            raise UserError(f"the added token {token.content!r:.60} has id {token.id}, which is another's")
    behind = range(len(pieces), max(by_id, default=-1) + 1)
    return [by_id.get(id) or filler(id) for id in sorted({*by_id, *behind})]


def sentencepiece_of(specification: Mapping[str, Any], reordered: bool = False) -> SentencePiece | None:
    """Rebuild the SentencePiece model of a parsed `tokenizer_json`, without control pieces at the end.

    reordered: invert `published_ids.laid_out`, and include the pieces without an id. Returns None for other
    vocabularies, and unless `reordered` for BPE."""
    kinds = ("Unigram", "BPE") if reordered else ("Unigram",)
    if not is_sentencepiece(specification) or specification["model"]["type"] not in kinds:
        return None
    model, roles, added = specification["model"], roles_of(specification), _added(specification)
    if bool(roles) != reordered:
        return None
    if isinstance(model["vocab"], dict):  # BPE: a score is minus the rank of the first merge
        ranks = {"".join(pair): -float(i) for i, pair in reversed([*enumerate(model["merges"])])}
        vocabulary, unknown = [[text, ranks.get(text, 0.0)] for text in model["vocab"]], model["vocab"][UNK]
    else:
        vocabulary, unknown = model["vocab"], model["unk_id"]
    cut, fallback = roles.get(CUT, ()), bool(model.get("byte_fallback"))
    control = {each["content"] for each in added if each["id"] not in cut}
    types = dict.fromkeys(BYTES if fallback else (), BYTE) | dict.fromkeys(control, CONTROL)
    types[vocabulary[unknown][0]] = UNKNOWN
    pieces = [Piece(text, score, types.get(text, NORMAL)) for text, score in vocabulary]
    if reordered:
        own = [piece for piece in pieces if piece.type in (NORMAL, BYTE) and not piece.text.startswith(" ")]
        ends = [Piece(UNK, 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece(END, 0.0, CONTROL)]
        pieces = [*ends, *own, *(Piece(*pair) for pair in roles.get("missing", []))]
    tables = [each for each in _normalizers(specification) if each["type"] == "Precompiled"]
    pieces = pieces[: 1 + max(id for id, piece in enumerate(pieces) if piece.type in (NORMAL, BYTE))]
    ids = {piece.text: id for id, piece in enumerate(pieces) if piece.type in (CONTROL, UNKNOWN)}
    return SentencePiece(
        pieces=tuple(pieces),
        model_type=UNIGRAM if model["type"] == "Unigram" else BPE,
        byte_fallback=fallback,
        charsmap=base64.b64decode(tables[0]["precompiled_charsmap"]) if tables else b"",
        normalizer="nmt_nfkc" if tables else "identity",
        dummy_prefix=mark_of(specification)["prepend_scheme"] != "never",
        remove_extra_whitespace=bool({*patterns_of(specification)} - {WHITE_SPACE, WHITE_ENDS}),
        special=(0 if reordered else unknown, ids.get("<s>", -1), ids.get(END, -1), ids.get("<pad>", -1)),
    )


def _text(id: int, piece: Piece) -> str:
    """A piece's text. Unused pieces and those of the target's model begin with a space, which normalised text doesn't
    have, so that no text is split into them."""
    return f" unused {id}" if piece.type == UNUSED else f" {piece.text}" if piece.type == TARGET_ONLY else piece.text


def _score(model: SentencePiece, piece: Piece, best: float) -> float:
    """A piece's score. A user-defined piece beats every segmentation of it, as in SentencePiece."""
    defined = piece.type == USER_DEFINED and model.model_type != BPE
    return len(piece.text) * best - 0.1 if defined else piece.score


def _unigram(model: SentencePiece, pieces: list[tuple[str, float, int]]) -> dict[str, Any]:
    vocabulary = [[text, score] for text, score, _ in pieces]
    (unknown,) = model.ids_of(UNKNOWN)
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": model.byte_fallback}


def _bpe(model: SentencePiece, pieces: list[tuple[str, float, int]]) -> dict[str, Any]:
    """The BPE model. Its merges are all pairs of pieces that form a piece, by falling score of that piece."""
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


def is_sentencepiece(specification: Mapping[str, Any]) -> bool:
    """Whether a parsed tokenizer.json has the components that `tokenizer_json` writes; it may also lowercase text."""
    normalizer = specification.get("normalizer")
    kinds = ("Precompiled", "Replace", "Lowercase")
    parts = normalizer.get("normalizers") if isinstance(normalizer, dict) else []
    return (
        bool(mark_of(specification))
        and specification["model"].get("type") in ("Unigram", "BPE")
        and isinstance(parts, list)
        and all(isinstance(part, dict) and part.get("type") in kinds for part in parts)
    )


def with_mark(specification: Mapping[str, Any], scheme: str) -> dict[str, Any]:
    """Set where a parsed tokenizer.json puts a space before a text.

    scheme: "always"; "never"; "first": only at the beginning of a text, not after an added token.
    """
    before, mark = specification["pre_tokenizer"], {**mark_of(specification), "prepend_scheme": scheme}
    return {
        **specification,
        "pre_tokenizer": mark if before["type"] == "Metaspace" else {**before, "pretokenizers": [WORDS_FIRST, mark]},
    }


class ExactText:
    """Encodes text exactly as SentencePiece; the components of a `tokenizer_json` differ in a few texts."""

    def __init__(self, specification: dict[str, Any]) -> None:
        """specification: the parsed file, which `tokenizers` must have read without an error."""
        roles = roles_of(specification)
        tables = [each["precompiled_charsmap"] for each in _normalizers(specification) if each["type"] == "Precompiled"]
        self._table = base64.b64decode(tables[0]) if tables else b""
        self._charsmap: Charsmap | None = None
        kinds = [each["type"] for each in _normalizers(specification)]
        self._spacing = [(re.compile(x["pattern"]["Regex"]), x["content"]) for x in _replaced(specification)]
        self._white = self._spacing[: len(_before_white(specification))]
        self._lower = tokenizers.normalizers.Lowercase() if "Lowercase" in kinds else None
        self._published = PublishedIds(specification) if "lookup" in roles else None
        self._fixed = _without_faults(specification)
        self._backend = _backend(self._fixed)
        self._before, self._behind = _around(specification)
        whole = {*roles.get(WHOLE, ())}
        self._tokens = [token for token in added_tokens(specification) if token.id in whole]
        self._python = roles.get("strips") is True
        self._others: dict[tuple[bool, bool], tokenizers.Tokenizer] = {}

    @cached_property
    def _typed(self) -> Splitter:
        """Finds added tokens in text as it was typed."""
        if self._python:
            return PythonSplitter(self._tokens)
        return Splitter([token for token in self._tokens if not token.normalized])

    @cached_property
    def _normal(self) -> Splitter:
        """Finds the other added tokens in normalised text with changed spaces."""
        normal = [token for token in self._tokens if token.normalized and not self._python]
        return Splitter(normal, lambda content: self._spaced(content)[0])

    def _cutter(self, first: bool, spaced: bool) -> tokenizers.Tokenizer:
        """The tokenizer for text between added tokens.

        first: this text begins the whole text; it matters if only a text's first word gets a space. spaced: it is
        normalised and its spaces are changed.
        """
        whole = first or mark_of(self._fixed)["prepend_scheme"] != "first"
        if whole and not spaced:
            return self._backend
        if (whole, spaced) not in self._others:
            changed = self._fixed if whole else with_mark(self._fixed, "never")
            self._others[whole, spaced] = _backend({**changed, "normalizer": None} if spaced else changed)
        return self._others[whole, spaced]

    def encodings(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding | Cut]:
        """Encode texts, with </s>: `ids` and `word_ids` of each."""
        if self._tokens and (apart := {i for i, text in enumerate(texts) if self._may_split(text)}):
            others = iter(self._plain([text for i, text in enumerate(texts) if i not in apart]))
            return [self._by_parts(text)[0] if i in apart else next(others) for i, text in enumerate(texts)]
        return self._plain(texts)

    def _plain(self, texts: Sequence[str]) -> Sequence[tokenizers.Encoding | Cut]:
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
        normal = self._normal
        return self._typed.may_split(text) or (bool(normal.tokens) and normal.may_split(self._spaced(text)[0]))

    def _by_parts(self, text: str) -> tuple[Cut, list[Place]]:
        """Encode a text with added tokens; returns its ids and words, and the place of each token."""
        ids, words, places = list(self._before), [None] * len(self._before), [None] * len(self._before)
        word = 0
        for outer in self._typed.parts(text):
            for cut, origin in [self._token(outer)] if outer.id is not None else self._between(outer):
                count = 1 + max((each for each in cut.word_ids if each is not None), default=-1)
                ids += cut.ids
                words += [None if each is None else word + each for each in cut.word_ids]
                places += [None if each is None else (outer.start + each[0], outer.start + each[1]) for each in origin]
                word += count
        after = [None] * len(self._behind)
        return Cut([*ids, *self._behind], [*words, *after]), [*places, *after]

    def _token(self, part: Part) -> tuple[Cut, list[Place]]:
        return Cut([part.id or 0], [0]), [(0, part.end - part.start)]

    def _between(self, outer: Part) -> Iterator[tuple[Cut, list[Place]]]:
        """Encode the text between two typed added tokens, part by part; yields tokens and their places in it."""
        prefix, typed = None, outer.text
        if self._published is not None:
            prefix, typed = self._published.without_prefix(typed)
        spaced, known = self._spaced(typed) if self._normal.tokens else ("", [])
        if not self._normal.may_split(spaced):
            normal = self._normalized(typed)
            encoding = self._cutter(not outer.start, False).encode(normal, add_special_tokens=False)
            if self._published is None:
                yield Cut(encoding.ids, encoding.word_ids), self._places(typed, encoding.offsets)
            else:
                cut = self._published.cut(prefix, normal, encoding)
                yield cut, [None] * len(cut.ids)
            return
        for part in self._normal.parts(spaced):
            if part.id is not None:
                yield Cut([part.id], [0]), [(known[part.start][0], known[part.end - 1][1])]
                continue
            encoding = self._cutter(not outer.start + part.start, True).encode(part.text, add_special_tokens=False)
            offsets = [(part.start + start, part.start + end) for start, end in encoding.offsets]
            yield Cut(encoding.ids, encoding.word_ids), _at(known, offsets, len(typed))

    def located(self, texts: Sequence[str]) -> list[Located]:
        """Encode texts, with </s> and each token's place. Raises `UserError` for a vocabulary whose ids differ from its
        pieces' (`PublishedIds`), which only translators have."""
        if self._published is not None:
            raise UserError("the places of tokens in a text are unknown for this translator's vocabulary")
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

    def _places(self, text: str, places: Sequence[Place]) -> list[Place]:
        """Map places in the normalised text to places in `text`."""
        if self._charsmap is None or self._normalized(text) == text:  # lowercasing lengthens only a handful of letters
            return list(places)
        return _at(self._charsmap.places(self._small(text)), places, len(text))

    def _small(self, text: str) -> str:
        return text if self._lower is None else self._lower.normalize_str(text)

    def _replaced(self, text: str) -> str:
        text = self._small(text)
        if self._table:
            self._charsmap = self._charsmap or read_charsmap(self._table)
            text = self._charsmap.normalized(text)
        return text

    def _normalized(self, text: str) -> str:
        text = self._replaced(text)
        for pattern, by in self._white:
            text = pattern.sub(by, text)
        return text

    def _spaced(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Normalise a text and change its spaces; also returns the place in `text` of each character."""
        made = self._replaced(text)
        known = [(i, i + 1) for i in range(len(made))]
        if self._charsmap is not None and made != text:
            known = self._charsmap.places(self._small(text))
        for pattern, by in self._spacing:
            places, end = [], 0
            for found in pattern.finditer(made):
                places += known[end : found.start()]
                places += [(known[found.start()][0], known[found.end() - 1][1])] * len(by)
                end = found.end()
            made, known = pattern.sub(by, made), [*places, *known[end:]]
        return made, known


def _at(known: Sequence[tuple[int, int]], places: Sequence[Place], end: int) -> list[Place]:
    """Map tokens' places in a normalised text to a text of `end` characters.

    known: the place in the text of each character of the normalised text.
    """
    known = [*known, (end, end)]
    return [
        None if place is None else (known[place[0]][0], known[max(place[0], place[1] - 1)][place[0] < place[1]])
        for place in places
    ]


def _backend(specification: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(specification))
    backend.no_padding()
    backend.no_truncation()
    return backend


def _around(specification: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The ids that the template adds before and after a text."""
    template = specification["post_processor"]
    sides: list[list[int]] = [[], []]
    side = 0
    for part in template["single"]:
        side |= "Sequence" in part
        if "SpecialToken" in part:
            sides[side] += template["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return sides[0], sides[1]


def _without_faults(specification: dict[str, Any]) -> dict[str, Any]:
    """Leave to `tokenizers` only what it does as SentencePiece does.

    The table, the changes of white space and the tokens of `WHOLE` are removed: `ExactText` handles them itself. Each
    control piece gets a space at its end, so that no text can spell it.
    """
    changed, done = copy.copy(specification), _before_white(specification)
    roles = roles_of(specification)
    whole = {*roles.get(WHOLE, ())}
    changed["added_tokens"] = [
        x for x in _added(specification) if not x["special"] and not roles.get("prefixes") and x["id"] not in whole
    ]
    cut = {*roles.get(CUT, ())}
    control = {x["content"] for x in _added(specification) if x["id"] not in cut}
    control -= {x["content"] for x in changed["added_tokens"]}
    normalizers = [
        each
        for each in _normalizers(specification)
        if each["type"] != "Precompiled" and each.get("pattern", {}).get("Regex") not in done
    ]
    changed["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
    model = dict(specification["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [[f"{text} " if text in control else text, score] for text, score in model["vocab"]]
        model["vocab"] += roles.get("missing", [])
    return {**changed, "model": model}


def _before_white(specification: Mapping[str, Any]) -> list[str]:
    """The patterns up to the last one in `WHITE`. Earlier ones, e.g. for runs of spaces, must be applied before it."""
    patterns = patterns_of(specification)
    return patterns[: max((i + 1 for i, pattern in enumerate(patterns) if pattern in WHITE), default=0)]


def patterns_of(specification: Mapping[str, Any]) -> list[str]:
    """The regular expressions whose matches a parsed tokenizer.json replaces before it splits text."""
    return [each["pattern"]["Regex"] for each in _replaced(specification)]


def _replaced(specification: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [x for x in _normalizers(specification) if x["type"] == "Replace" and "Regex" in x["pattern"]]


def _normalizers(specification: Mapping[str, Any]) -> list[dict[str, Any]]:
    return (specification.get("normalizer") or {"normalizers": []})["normalizers"]


def _added(specification: Mapping[str, Any]) -> list[dict[str, Any]]:
    return specification.get("added_tokens") or []
