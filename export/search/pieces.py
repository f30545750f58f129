"""Text in and out of a search graph with a SentencePiece vocabulary.

SentencepieceTokenizer of onnxruntime-extensions contains SentencePiece itself. It cuts text with a model rebuilt from
tokenizer.json; standard operators look up tokens of the vocabulary missing in this model. The ids are those of
`text/sentencepiece_tokenizer.py`; where that module differs from SentencePiece, as it says, they are SentencePiece's.

Its other operators fail: HfJsonTokenizer takes one text at a time and gives no </s> for an empty text, and
SentencepieceDecoder takes one row, and writes <unk> as U+2047.

Shapes: B lines, N tokens of all lines, R texts to write, T their tokens.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from export.nn.primitives import Op, table
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.generation.translate import Translator
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.added_tokens import WHOLE, AddedToken, added_tokens
from mlx_transformer.text.published_ids import roles_of
from mlx_transformer.text.sentencepiece import (
    BPE,
    BYTE,
    BYTES,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    SentencePiece,
    replacements,
    sentencepiece_bytes,
)
from mlx_transformer.text.sentencepiece_tokenizer import (
    ENDED_SPACES_PATTERN,
    WHITE_ENDS,
    WHITE_SPACE,
    is_sentencepiece,
    patterns_of,
)
from mlx_transformer.text.sentencepiece_tokenizer import WHITE as WHITE_CHANGES
from mlx_transformer.text.tokenizer import Tokenizer

from .text import (
    CODE_TEXTS,
    END,
    REPLACEMENT,
    SEPARATOR,
    WHITE,
    TextOps,
    custom,
    integer,
    one_of,
    replaced,
    split,
    strings,
    value_of,
    well_formed,
)

SPACE = "▁"
NEARER = 1e-3
"""Extra score of a piece of unknown letters for each pair of letters, so that the longest wins."""


class PieceOps(TextOps):
    """The tokenizer of a tokenizer.json, or of one per language, written by `families` or `train`."""

    def __init__(self, tokenizer: str, config: TransformerConfig):
        """Raises UserError if the vocabulary isn't SentencePiece's, doesn't fit the model, or has pieces the operators
        would cut differently from the other runtimes."""
        whole = Tokenizer(tokenizer)
        Translator(config, whole, list)
        sides = side_texts(tokenizer) or {"source": tokenizer, "target": tokenizer}
        source, target = (json.loads(text) for text in sides.values())
        self.positions, self.size = config.max_positions, config.vocab_size
        self.pad, self.unknown = whole.source.pad_id, whole.source.unk_id
        self.roles, self.known = roles_of(source), len(_scored(source))
        self.whole, self.source = _whole(source), source
        _check_whole(self.whole, source, whole)
        self.surfaces = _surfaces(source) if "lookup" in self.roles else {}
        # An attribute is text, so in base64; the operator decodes it.
        model = _model(source, self.surfaces, whole.source.eos_id)
        self.changes = patterns_of(source)
        self.after = [whole.source.eos_id] if ENDED_SPACES_PATTERN in self.changes else None
        self.spaces, self.ends = _white(source, model.charsmap)
        self.model = base64.b64encode(sentencepiece_bytes(model)).decode()
        known = {token.id for token in self.whole}
        self.prefixes = {x["content"]: x["id"] for x in _added(source) if not x["special"] and x["id"] not in known}
        self._read_target(target, whole)

    def _read_target(self, target: Mapping[str, Any], whole: Tokenizer) -> None:
        """Read each id's spelling, which ids have none, and which are bytes."""
        spelled = [text.replace(" ", "") if " " in text else text for text, _ in _scored(target)]
        silent = {*whole.special_ids, *range(len(spelled), self.size + 1)}
        self.silent = np.array([id in silent for id in range(self.size + 1)])
        self.bytes = np.full(self.size + 1, SEPARATOR, np.int64)
        if target["model"].get("byte_fallback"):
            self.bytes[[spelled.index(text) for text in BYTES]] = range(256)
        texts = ["" if id in silent else spelled[id] for id in range(self.size + 1)]
        inside, first = ([text.replace(SPACE, by) for text in texts] for by in (" ", ""))
        begins_with_space = target["pre_tokenizer"]["prepend_scheme"] != "never"
        self.spelling = [*inside, *(first if begins_with_space else inside), *CODE_TEXTS]
        """Each id's text, then each id's text at the beginning of a line, then the bytes."""
        self.strips = roles_of(target).get("strips") is True

    def cut(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        if ENDED_SPACES_PATTERN in self.changes:
            return self._by_parts(op, text)
        has_prefixes = bool(self.roles.get("prefixes"))
        first, text = self._prefix(op, text) if has_prefixes else (None, text)
        if WHITE_SPACE in self.changes:
            text = replaced(op, text, "white", self.spaces, " ")
        elif WHITE_ENDS in self.changes:
            text = replaced(op, text, "white", f"{self.ends}+$", "")
        text = self._spaced(op, text) if self.whole else text
        tokens, rows = self._cut(op, text, bos=has_prefixes, eos=True)
        if self.whole:
            tokens, rows = self._without_marks(op, tokens, rows)
        if self.surfaces:
            tokens, rows = self._looked_up(op, tokens, rows)
        if self.roles.get("missing"):
            tokens = op.Where(op.Less(tokens, self.known), tokens, self.unknown)
        start, end = op.Slice(rows, [0], [-1], [0]), op.Slice(rows, [1], [END], [0])  # (B,)
        if first is not None:
            tokens = op.ScatterElements(tokens, start, first, axis=0)
            start = op.Add(start, integer(op, op.Less(first, 0)))
        return tokens, start, op.Sub(end, start)

    def _cut(self, op: Op, text: ir.Value, bos: bool, eos: bool) -> tuple[ir.Value, ir.Value]:
        """Text (B,) to the tokens of all lines (N,), and where each line begins and the last one ends (B+1,). bos: of
        id -1, a prefix's place."""
        none = (table(op, f"text.{t.__name__}", lambda t=t: np.zeros(1, t)) for t in (np.int64, np.float32))  # sampling
        flags = bos, eos, False, False  # not reversed, not numbered as in fairseq
        values = (table(op, f"text.{flag}", lambda flag=flag: np.array([flag])) for flag in flags)
        tokens, rows = custom(op, "SentencepieceTokenizer", text, *none, *values, model=self.model, kinds="iI")
        return integer(op, tokens), rows

    def _by_parts(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The same where text may end with a space, also before an added token: what stands between two of them is cut
        by itself, with a space before it."""
        if not self.whole:
            tokens, rows = self._cut(op, self._begun(op, text), bos=False, eos=False)
        else:
            every = one_of(token.content for token in self.whole)
            parts, first = split(op, self._close(op, text), "added", every)
            parts = op.Concat(parts, strings(op, "text.one", ["."]), axis=0)  # the operator takes no empty list
            ids = value_of(op, parts, {token.content: token.id for token in self.whole}, -1)
            is_token = op.GreaterOrEqual(ids, 0)
            # A space is one token, in whose place the added one is put.
            begun = op.Where(is_token, strings(op, "text.blank", [" "]), self._begun(op, parts))
            tokens, rows = self._cut(op, begun, bos=False, eos=False)
            place = op.Compress(op.Slice(rows, [0], [-1], [0]), is_token, axis=0)
            tokens = op.ScatterElements(tokens, place, op.Compress(ids, is_token, axis=0), axis=0)
            rows = op.Gather(rows, first)  # (B+1,)
        start = op.Slice(rows, [0], [-1], [0])
        return tokens, start, op.Sub(op.Slice(rows, [1], [END], [0]), start)

    def _begun(self, op: Op, text: ir.Value) -> ir.Value:
        """Text (B,) with single spaces, and one before it."""
        return replaced(op, replaced(op, text, "spaces", f"{self.spaces}+", " "), "begin", "(?s)^([^ ▁])", r" \1")

    def _close(self, op: Op, text: ir.Value) -> ir.Value:
        """Text (B,) without the white space that added tokens take with them."""
        for flag, (before, behind) in {"lstrip": (f"[{WHITE}]+", ""), "rstrip": ("", f"[{WHITE}]+")}.items():
            if flagged := [token.content for token in self.whole if getattr(token, flag)]:
                text = replaced(op, text, flag, before + one_of(flagged) + behind, r"\1")
        return text

    def _spaced(self, op: Op, text: ir.Value) -> ir.Value:
        """Text (B,) without spaces before an added token; behind it one, where text begins with one there."""
        text = self._close(op, text)
        every = f"{self.ends}*" + one_of(token.content for token in self.whole)
        if self.source["pre_tokenizer"]["prepend_scheme"] == "always":
            return replaced(op, text, "added", f"{every}{self.spaces}*", r"\1 ")
        return replaced(op, text, "added", every, r"\1")

    def _without_marks(self, op: Op, tokens: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Tokens (N,) and rows (B+1,) without marks of spaces that no text has: before an added token, and behind
        another one or a line's beginning."""
        whole = np.zeros(self.known + len(self.roles.get("missing", ())) + 1, np.int64)
        whole[[-1, *(token.id for token in self.whole)]] = 1  # the last is for -1, which a line begins with
        is_whole = op.Gather(table(op, "text.whole", lambda: whole), tokens)  # (N,)
        after = op.Slice(op.Concat(is_whole, [0], axis=0), [1], [END], [0])
        nothing, one = op.Mul(op.Concat(is_whole, [0], axis=0), 0), op.Add(op.Mul(rows, 0), 1)
        begins = op.Slice(op.ScatterElements(nothing, rows, one, axis=0), [0], [-1], [0])
        before = op.Max(begins, op.Slice(op.Concat([0], is_whole, axis=0), [0], [-1], [0]))
        mark = [text for text, _ in _scored(self.source)].index(SPACE)
        kept = op.Equal(op.Mul(op.Mul(integer(op, op.Equal(tokens, mark)), before), after), 0)
        total = op.Concat([0], op.CumSum(integer(op, kept), 0), axis=0)
        return op.Compress(tokens, kept, axis=0), op.Gather(total, rows)

    def _prefix(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The id (B,) of a token such as >>deu<< at the beginning of a line, -1 without one, and the rest of the
        line."""
        beginning = replaced(op, text, "beginning", "(?s)^(>>.*?<<)?.*$", r"\1")
        first = value_of(op, beginning, {"": -1, **self.prefixes}, self.unknown)
        return first, replaced(op, text, "rest", "(?s)^>>.*?<<", "")

    def _looked_up(self, op: Op, tokens: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Merge neighbouring tokens unknown to the model: a single one keeps its id, several become <unk>."""
        strange = np.zeros(self.known + len(self.roles.get("missing", ())) + 1, np.int64)  # the last entry is for -1
        strange[[self.unknown, *self.surfaces.values()]] = 1
        marks = op.Gather(table(op, "text.strange", lambda: strange), tokens)  # (N,)
        before = op.Slice(op.Concat([0], marks, axis=0), [0], [-1], [0])
        after = op.Slice(op.Concat(marks, [0], axis=0), [1], [END], [0])
        tokens = op.Where(op.Greater(op.Mul(marks, after), 0), self.unknown, tokens)
        kept = op.Equal(op.Mul(marks, before), 0)
        total = op.Concat([0], op.CumSum(integer(op, kept), 0), axis=0)
        return op.Compress(tokens, kept, axis=0), op.Gather(total, rows)

    def decode(self, op: Op, sequences: ir.Value, blank: ir.Value) -> ir.Value:
        texts = super().decode(op, sequences, blank)
        ends = rf"^[{WHITE}\x{{1c}}-\x{{1f}}]+|[{WHITE}\x{{1c}}-\x{{1f}}]+$"
        if not self.strips:
            return texts
        shape = op.Shape(texts)
        return op.Reshape(replaced(op, op.Reshape(texts, [-1]), "ends", ends, ""), shape)

    def spell(self, op: Op, tokens: ir.Value) -> ir.Value:
        silent = op.Gather(table(op, "text.silent", lambda: self.silent), tokens)
        spoken = integer(op, op.Not(silent))
        is_first = op.Equal(op.Mul(op.CumSum(spoken, 1), spoken), 1)
        places = op.Add(tokens, op.Where(is_first, self.size + 1, 0))
        if (self.bytes < SEPARATOR).any():
            places = self._with_bytes(op, tokens, places, silent)
        return op.Gather(strings(op, "text.spelled", self.spelling), places)

    def _with_bytes(self, op: Op, tokens: ir.Value, places: ir.Value, silent: ir.Value) -> ir.Value:
        """Places (R, T) in `spelling`, with byte tokens replaced: neighbours that form UTF-8 together spell it, others
        become U+FFFD each."""
        # Tokens without a text don't separate bytes.
        index = op.Transpose(op.NonZero(op.Or(op.Not(silent), op.Equal(tokens, self.size))), perm=[1, 0])  # (N, 2)
        stream = op.Gather(table(op, "text.bytes", lambda: self.bytes), op.GatherND(tokens, index))  # (N,)
        parts = op.Equal(stream, SEPARATOR)
        wrong = integer(op, op.GreaterOrEqual(well_formed(op, stream), REPLACEMENT))
        run = op.CumSum(integer(op, parts), 0)  # (N,): which run of bytes
        empty = op.Expand(0, op.Add(op.Shape(run), 1))
        wrong = op.Gather(op.ScatterElements(empty, run, wrong, axis=0, reduction="max"), run)
        codes = op.Add(op.Where(op.Greater(wrong, 0), REPLACEMENT, stream), 2 * (self.size + 1))
        return op.ScatterND(places, index, op.Where(parts, op.GatherND(places, index), codes))


def has_pieces(tokenizer: str) -> bool:
    """Whether this tokenizer.json (or both of its sides) is SentencePiece's."""
    return all(is_sentencepiece(json.loads(text)) for text in (side_texts(tokenizer) or {"": tokenizer}).values())


def _added(specification: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return specification.get("added_tokens") or []


def _scored(specification: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Pieces and scores in the order of ids. In a BPE model the score is minus the rank of the first merge that makes
    the piece."""
    model = specification["model"]
    size = len(model["vocab"])
    behind = [(token.content, 0.0) for token in added_tokens(specification) if token.id >= size]
    if model["type"] == "Unigram":
        return [*((text, score) for text, score in model["vocab"]), *behind]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        ranks.setdefault(left + right, rank)
    texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return [*((text, -float(ranks.get(text, 0))) for text in texts), *behind]


def _whole(specification: Mapping[str, Any]) -> list[AddedToken]:
    """The added tokens that are found in text."""
    known = {*roles_of(specification).get(WHOLE, ())}
    return [token for token in added_tokens(specification) if token.id in known]


def _check_whole(tokens: Sequence[AddedToken], specification: Mapping[str, Any], whole: Tokenizer) -> None:
    """Raise `UserError`, which names it, for an added token that operators treat otherwise than the runtimes do."""
    ended = ENDED_SPACES_PATTERN in patterns_of(specification)
    if ended and specification["pre_tokenizer"]["prepend_scheme"] != "always":
        raise UserError("tokenizer.json: a space at the end is a piece, and none at the beginning; export without text")
    texts = {text for text, _ in _scored(specification)}
    spoken = {token.id for token in whole.added if not token.special}
    for token in tokens:
        apart = roles_of(specification).get("apart") and token.id in spoken
        reasons = {
            "is one as a word by itself only": token.single_word,
            "isn't printable": not token.content.isprintable(),
            "stands beside spaces, which are no piece": SPACE not in texts and not ended,
            "has a space on either side in what is written": apart,
        }
        if why := [reason for reason, holds in reasons.items() if holds]:
            raise UserError(
                f"tokenizer.json: the added token {token.content!r:.60} {why[0]}, which no operator does; export "
                "without text"
            )


def _white(specification: Mapping[str, Any], table: bytes) -> tuple[str, str]:
    """Two classes of letters, as they are typed: those that become spaces, and those that go where a text, or what
    stands before an added token, ends. `UserError` for a table whose white space can't be told by single letters."""
    changes = {*patterns_of(specification)}
    pairs, white = replacements(table) if table else {}, re.compile(WHITE_SPACE)
    letters = {key for key in pairs if len(key) == 1} | {chr(code) for code in range(1, 0x3001)}
    made = {letter: pairs.get(letter, letter) for letter in letters}
    strange = [key for key, value in pairs.items() if len(key) > 1 and (white.search(key) or white.search(value))]
    if changes & {*WHITE_CHANGES} and (strange or any(white.search(x) and x.strip() for x in made.values())):
        raise UserError("tokenizer.json: its table makes white space that no operator finds; export without text")
    spaces = {letter for letter, text in made.items() if text and not text.strip(" ")}
    other = {letter for letter, text in made.items() if text.strip(" ") and not white.sub("", text).strip(" ")}
    nothing = {letter for letter, text in made.items() if not text}
    return (
        _class(spaces | other if WHITE_SPACE in changes else spaces),
        _class(spaces | other | nothing if WHITE_ENDS in changes else spaces),
    )


def _class(letters: Iterable[str]) -> str:
    return "[" + "".join(f"\\x{{{ord(letter):x}}}" for letter in sorted(letters)) + "]"


def _surfaces(specification: Mapping[str, Any]) -> dict[str, int]:
    """{text: id} of the vocabulary's tokens missing in the source's model, together with all their letters."""
    texts = [text for text, _ in _scored(specification)]
    letters = {text for text in texts if len(text) == 1} | {t for t, _ in roles_of(specification).get("missing", [])}
    return {
        text[1:]: id
        for id, text in enumerate(texts)
        if text.startswith(" ") and text[1:] and not text.startswith(" unused ") and not letters & {*text[1:]}
    }


def _model(specification: Mapping[str, Any], surfaces: Mapping[str, int], eos: int) -> SentencePiece:
    """The SentencePiece model that gives the ids of a tokenizer.json. Pieces without an id get numbers after the
    vocabulary."""
    model, roles, scored = specification["model"], roles_of(specification), _scored(specification)
    normalizers = (specification.get("normalizer") or {"normalizers": []})["normalizers"]
    whole = {token.content for token in _whole(specification)}
    control = {each["content"] for each in _added(specification)} - whole
    defined = [each for each in _added(specification) if not each["special"] and each["content"] not in whole]
    if defined and not roles.get("prefixes"):
        raise UserError("tokenizer.json: pieces that users defined are cut by no operator; export without text")
    unigram, fallback = model["type"] == "Unigram", bool(model.get("byte_fallback"))
    ended = ENDED_SPACES_PATTERN in patterns_of(specification)  # then operators collapse spaces and put the first one
    unknown = model["unk_id"] if unigram else model["vocab"][model["unk_token"]]
    kinds = dict.fromkeys(BYTES, BYTE) if fallback else {}
    kinds |= dict.fromkeys((*control, *(text for text, _ in scored if text.startswith(" "))), CONTROL)
    kinds |= {scored[unknown][0]: UNKNOWN, **dict.fromkeys(whole, USER_DEFINED)}
    pieces = [Piece(text, score, kinds.get(text, NORMAL)) for text, score in scored]
    pieces += [Piece(text, score) for text, score in roles.get("missing", [])]
    known = {piece.text for piece in pieces if piece.type == NORMAL}
    if surfaces and (not unigram or {letter for text in known for letter in text} - known):
        raise UserError("tokenizer.json: operators can't look up what its model doesn't know; export without text")
    lowest = min(score for _, score in scored) - 10
    for text, id in surfaces.items():
        pieces[id] = Piece(text, lowest * len(text) + NEARER * len(text) ** 2)
    tables = [each["precompiled_charsmap"] for each in normalizers if each["type"] == "Precompiled"]
    return SentencePiece(
        pieces=tuple(pieces),
        model_type=UNIGRAM if unigram else BPE,
        byte_fallback=fallback,
        charsmap=base64.b64decode(tables[0]) if tables else b"",
        normalizer="nmt_nfkc" if tables else "identity",
        dummy_prefix=specification["pre_tokenizer"]["prepend_scheme"] != "never" and not ended,
        remove_extra_whitespace=bool({*patterns_of(specification)} - {*WHITE_CHANGES}) and not ended,
        special=(unknown, -1, eos, -1),
    )
