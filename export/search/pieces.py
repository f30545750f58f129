"""Text in and out of a search graph whose vocabulary is SentencePiece's: one operator of onnxruntime-extensions cuts
text, which holds SentencePiece itself, and standard ones look up what it can't know.

The ids are those of `core/sentencepiece_tokenizer.py`, but where that says that it differs from SentencePiece: there
they are SentencePiece's.

Shapes: B lines, N tokens of all lines, n hypotheses, T their tokens, V vocabulary.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from export.nn.primitives import Op, size, table
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.published_ids import roles_of
from mlx_transformer.core.sentencepiece import (
    BPE,
    BYTE,
    BYTES,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    Piece,
    SentencePiece,
    sentencepiece_bytes,
)
from mlx_transformer.core.sentencepiece_tokenizer import is_sentencepiece
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.generation.translate import Translator
from mlx_transformer.system.errors import UserError

from .metadata import TEXT_DOMAIN
from .text import BLANK, END, REPLACEMENT, SEPARATOR, Lines, code_texts, replaced, strings, well_formed

SPACE = "▁"
SAMPLED = {"n_best": np.int64, "alpha": np.float32}
"""Inputs for ways to cut text at random: 0, none."""
NEARER = 1e-3
"""The score that a piece of unknown letters gains for each pair of them, so that the longest wins."""


class PieceOps:
    """Tokenizer and detokenizer from the text of a tokenizer.json that `families` or `train` wrote."""

    def __init__(self, tokenizer: str, config: TransformerConfig):
        """`UserError` for a vocabulary that isn't SentencePiece's, doesn't fit the model, or that the operators cut
        otherwise than the runtimes do."""
        whole = Tokenizer(tokenizer)
        Translator(config, whole, list)
        sides = side_texts(tokenizer) or {"source": tokenizer, "target": tokenizer}
        source, target = (json.loads(text) for text in sides.values())
        self.source, self.roles = source, roles_of(source)
        self.pad, self.eos, self.unknown = whole.source.pad_id, whole.source.eos_id, whole.source.unk_id
        self.positions, self.size = config.max_positions, config.vocab_size
        self.texts = [text for text, _ in _scored(source)]
        self.surfaces = _surfaces(source) if "lookup" in self.roles else {}
        # The operator takes base64 for what it is; an attribute is text, in which a model's bytes have no place.
        self.model = base64.b64encode(sentencepiece_bytes(_cutter(source, self.surfaces, self.eos))).decode()
        self.prefixes = {x["content"]: x["id"] for x in _added(source) if not x["special"]}
        self._read_target(target, whole)

    def _read_target(self, target: Mapping[str, Any], whole: Tokenizer) -> None:
        """Read how its ids are spelled: texts of all, which of them are texts, and which are bytes."""
        self.spelled = [text.replace(" ", "") if " " in text else text for text, _ in _scored(target)]
        known = len(self.spelled)
        self.silent = np.array([i in whole.special_ids for i in range(known)] + [True] * (self.size + 1 - known))
        self.bytes = np.full(self.size + 1, SEPARATOR, np.int64)
        if target["model"].get("byte_fallback"):
            for byte, text in enumerate(BYTES):
                self.bytes[self.spelled.index(text)] = byte
        self.begins_with_space = target["pre_tokenizer"]["prepend_scheme"] != "never"

    def encode(self, op: Op, text: ir.Value) -> Lines:
        """
        text (B,) --> SentencePiece --> tokens (N,) --> ids (B, S)
                                   \\--> rows (B+1,) -----^
        """
        blank = op.RegexFullMatch(text, pattern=BLANK)
        first, rest = self._prefix(op, text) if self.roles.get("prefixes") else (None, text)
        tokens, rows = self._cut(op, rest)
        tokens, rows = self._looked_up(op, tokens, rows) if self.surfaces else (tokens, rows)
        if self.roles.get("missing"):
            tokens = op.Where(op.Less(tokens, len(self.texts)), tokens, self.unknown)
        start, end = op.Slice(rows, [0], [-1], [0]), op.Slice(rows, [1], [END], [0])  # (B,)
        tokens = op.Concat([self.eos], tokens, axis=0)  # something to read before the first line
        count, begin = op.Sub(end, start), op.Add(start, 1)
        if first is not None:
            begins = op.Cast(op.GreaterOrEqual(first, 0), to=ir.DataType.INT64)  # (B,)
            count, begin = op.Add(count, begins), op.Sub(begin, begins)
        lines = Lines.of(op, tokens, begin, count, self.pad, self.positions, blank)
        if first is None:
            return lines
        first = op.Unsqueeze(first, [1])
        column = op.Range(0, size(op, lines.ids, 1), 1)
        ids = op.Where(op.And(op.Equal(column, 0), op.GreaterOrEqual(first, 0)), first, lines.ids)
        return replace(lines, ids=ids)

    def _cut(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return tokens (N,), </s> after each line's, and the first of each line (B+1,)."""
        count, alpha = (table(op, f"text.{n}", lambda dtype=d: np.zeros(1, dtype)) for n, d in SAMPLED.items())
        no, yes = (table(op, f"text.{flag}", lambda flag=flag: np.array([flag])) for flag in (False, True))
        inputs = text, count, alpha, no, yes, no, no  # <s>, </s>, reversed, ids as fairseq counts
        outputs = op.SentencepieceTokenizer(*inputs, model=self.model, _domain=TEXT_DOMAIN, _outputs=2)
        for value, dtype in zip(outputs, (ir.DataType.INT32, ir.DataType.INT64), strict=True):
            value.type, value.shape = ir.TensorType(dtype), ir.Shape([None])
        return op.Cast(outputs[0], to=ir.DataType.INT64), outputs[1]

    def _prefix(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the id of the token such as >>deu<< that a line begins with (B,), -1: none; and the rest."""
        beginning = replaced(op, text, "beginning", "(?s)^(>>.*?<<)?.*$", r"\1")
        names, ids = zip(*self.prefixes.items(), strict=True) if self.prefixes else ((), ())
        none = op.Equal(beginning, strings(op, "text.nothing", [""]))
        first: ir.Value = op.Where(none, -1, self.unknown)
        if names:
            same = op.Equal(op.Unsqueeze(beginning, [1]), strings(op, "text.prefixes", list(names)))  # (B, K)
            more = table(op, "text.prefix_ids", lambda: np.array(ids, np.int64) - self.unknown)
            first = op.Add(first, op.ReduceSum(op.Where(same, more, 0), [1], keepdims=0))
        return first, replaced(op, text, "rest", "(?s)^>>.*?<<", "")

    def _looked_up(self, op: Op, tokens: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return what the model doesn't know is one token from the first unknown letter to the last: one that the
        vocabulary has, or <unk>."""
        strange = np.zeros(self._known, np.bool_)
        strange[[self.unknown, *self.surfaces.values()]] = True
        marks = op.Gather(table(op, "text.strange", lambda: strange), tokens)  # (N,)
        marks = op.Cast(marks, to=ir.DataType.INT64)
        before = op.Slice(op.Concat([0], marks, axis=0), [0], [-1], [0])
        after = op.Slice(op.Concat(marks, [0], axis=0), [1], [END], [0])
        tokens = op.Where(op.Greater(op.Mul(marks, after), 0), self.unknown, tokens)
        first_marks = op.Equal(op.Mul(marks, before), 0)
        total = op.Concat([0], op.CumSum(op.Cast(first_marks, to=ir.DataType.INT64), 0), axis=0)
        return op.Compress(tokens, first_marks, axis=0), op.Gather(total, rows)

    @property
    def _known(self) -> int:
        """Ids that the operator gives."""
        return len(self.texts) + len(self.roles.get("missing", ()))

    def decode(self, op: Op, sequences: ir.Value, blank: ir.Value) -> ir.Value:
        """
        ids (B, n, T) --> which are text, and the first of these --> their spellings --> rows, each joined (B, n)
        """
        shape = op.Shape(sequences, start=0, end=2)  # (2,): B, n
        nothing = op.Expand(self.size, op.Concat(shape, [1], axis=0))
        tokens = op.Concat(op.Where(op.Unsqueeze(blank, [1, 2]), self.size, sequences), nothing, axis=2)
        tokens = op.Reshape(tokens, op.Concat([-1], op.Shape(tokens, start=2), axis=0))  # (B*n, T+1)
        silent = op.Gather(table(op, "text.silent", lambda: self.silent), tokens)
        spoken = op.Cast(op.Not(silent), to=ir.DataType.INT64)
        is_first = op.Equal(op.Mul(op.CumSum(spoken, 1), spoken), 1)
        places = op.Add(tokens, op.Where(is_first, self.size + 1, 0))
        if (self.bytes < SEPARATOR).any():
            places = self._with_bytes(op, tokens, places, silent)
        texts = op.Gather(strings(op, "text.spelled", self._spelling()), places)
        joined = op.StringJoin(texts, strings(op, "text.nothing", [""]), [1], _domain=TEXT_DOMAIN)
        return op.Reshape(joined, shape)

    def _with_bytes(self, op: Op, tokens: ir.Value, places: ir.Value, silent: ir.Value) -> ir.Value:
        """Return places of spellings (R, T+1), those of bytes in place of their tokens'. Bytes that follow each other
        are text together, or if they are no UTF-8 each is U+FFFD."""
        ends = op.Equal(tokens, self.size)
        parted = op.Or(op.Not(silent), ends)  # what is left out parts no bytes
        index = op.Transpose(op.NonZero(parted), perm=[1, 0])  # (N, 2)
        stream = op.Gather(table(op, "text.bytes", lambda: self.bytes), op.GatherND(tokens, index))  # (N,)
        wrong = op.Cast(op.GreaterOrEqual(well_formed(op, stream), REPLACEMENT), to=ir.DataType.INT64)
        run = op.CumSum(op.Cast(op.Equal(stream, SEPARATOR), to=ir.DataType.INT64), 0)  # (N,): which run it is in
        empty = op.Expand(0, op.Add(op.Shape(run), 1))
        wrong = op.Gather(op.ScatterElements(empty, run, wrong, axis=0, reduction="max"), run)
        own = 2 * (self.size + 1)
        spelled = op.Add(op.Where(op.Greater(wrong, 0), REPLACEMENT, stream), own)
        chosen = op.Where(op.Equal(stream, SEPARATOR), op.GatherND(places, index), spelled)
        return op.ScatterND(places, index, chosen)

    def _spelling(self) -> list[bytes]:
        """Return the text of each id inside a text, of each as its first token, and then of `code_texts`."""
        texts = [*self.spelled, *[""] * (self.size + 1 - len(self.spelled))]
        texts = ["" if silent else text for text, silent in zip(texts, self.silent, strict=True)]
        inside = [text.replace(SPACE, " ") for text in texts]
        first = [text.replace(SPACE, "") for text in texts] if self.begins_with_space else inside
        return [*(text.encode() for text in (*inside, *first)), *code_texts()]


def has_pieces(tokenizer: str) -> bool:
    """Return whether text of this tokenizer.json, or of both, is cut into SentencePiece's pieces."""
    return all(is_sentencepiece(json.loads(text)) for text in (side_texts(tokenizer) or {"": tokenizer}).values())


def _added(specification: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return specification.get("added_tokens") or []


def _scored(specification: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the pieces in the order of their ids; of a BPE model its score is how late it is merged first."""
    model = specification["model"]
    if model["type"] == "Unigram":
        return [(text, score) for text, score in model["vocab"]]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        ranks.setdefault(left + right, rank)
    return [(text, -float(ranks.get(text, 0))) for text in sorted(model["vocab"], key=model["vocab"].__getitem__)]


def _surfaces(specification: Mapping[str, Any]) -> dict[str, int]:
    """Return {text: id} of what the source's model doesn't know, and the vocabulary has, letter by letter unknown."""
    texts = [text for text, _ in _scored(specification)]
    letters = {text for text in texts if len(text) == 1} | {t for t, _ in roles_of(specification).get("missing", [])}
    return {
        text[1:]: id
        for id, text in enumerate(texts)
        if text.startswith(" ") and text[1:] and not text.startswith(" unused ") and not letters & {*text[1:]}
    }


def _cutter(specification: Mapping[str, Any], surfaces: Mapping[str, int], eos: int) -> SentencePiece:
    """Return the model that gives the ids of a tokenizer.json, and after them one for each piece without an id;
    `UserError` where there is none."""
    model, roles = specification["model"], roles_of(specification)
    prefixes = {each["content"] for each in _added(specification) if not each["special"]}
    control = {each["content"] for each in _added(specification) if each["special"]} | prefixes
    if prefixes and not roles.get("prefixes"):
        raise UserError("tokenizer.json: pieces that users defined are cut by no operator; export without text")
    unknown = model["unk_id"] if model["type"] == "Unigram" else model["vocab"][model["unk_token"]]
    fallback = bool(model.get("byte_fallback"))
    pieces = []
    for id, (text, score) in enumerate(_scored(specification)):
        kind = UNKNOWN if id == unknown else CONTROL if text in control or text.startswith(" ") else NORMAL
        kind = BYTE if fallback and text in BYTES_SET and kind == NORMAL else kind
        pieces.append(Piece(text, score, kind))
    pieces += [Piece(text, score) for text, score in roles.get("missing", [])]
    known = {piece.text for piece in pieces if piece.type == NORMAL}
    if surfaces and (model["type"] == "BPE" or {letter for text in known for letter in text} - known):
        raise UserError("tokenizer.json: operators can't look up what its model doesn't know; export without text")
    lowest = min(score for _, score in _scored(specification)) - 10
    for text, id in surfaces.items():
        pieces[id] = Piece(text, lowest * len(text) + NEARER * len(text) ** 2)
    tables = [each["precompiled_charsmap"] for each in _normalizers(specification) if each["type"] == "Precompiled"]
    return SentencePiece(
        pieces=tuple(pieces),
        model_type=UNIGRAM if model["type"] == "Unigram" else BPE,
        byte_fallback=fallback,
        charsmap=base64.b64decode(tables[0]) if tables else b"",
        normalizer="nmt_nfkc" if tables else "identity",
        dummy_prefix=specification["pre_tokenizer"]["prepend_scheme"] != "never",
        remove_extra_whitespace=any(each["type"] == "Replace" for each in _normalizers(specification)),
        special=(unknown, -1, eos, -1),
    )


BYTES_SET = frozenset(BYTES)


def _normalizers(specification: Mapping[str, Any]) -> list[dict[str, Any]]:
    return (specification.get("normalizer") or {"normalizers": []})["normalizers"]
