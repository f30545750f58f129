"""Text to ids inside a graph, for the WordPiece tokenizers of published encoders: BertNormalizer, BertPreTokenizer and
WordPiece of a tokenizer.json, as ONNX's operators and one of ONNX Runtime's own, `Tokenizer`, which takes a text apart.

The tokenizer itself is asked what becomes of each character, all 1,112,064 of them, so that neither the version of
Unicode nor a rule is a matter of opinion: it is lower-cased, taken apart, removed or set apart as the tokenizer does
it. The longest piece from every place (a trie, as in Song et al. 2021, "Fast WordPiece Tokenization", section 3.1) is
found for all places at once; from a word's beginning the pieces are then followed.

Shapes: B texts, C characters of the longest, M symbols of a character, N symbols of all texts, L tokens of the longest.
"""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import tokenizers

from export.nn.primitives import Op, table
from mlx_transformer.system.errors import UserError

from .steps import Carried, State, looped
from .text import Lines, integer, padded_width, rows_of, strings

MACHINE_LEARNING, ONNXRUNTIME = "ai.onnx.ml", "com.microsoft"
"""Domains of LabelEncoder, which looks up, and of Tokenizer."""
OPSETS = {MACHINE_LEARNING: 2, ONNXRUNTIME: 1}
NOTHING, SPACE, LETTER, SIGN = range(4)
"""Symbols: none, what separates words, and what is in no piece: part of a word, or a word by itself."""
DEAD, BEGIN, CONTINUE = range(3)
"""Nodes of the trie: where nothing goes on, and the roots of a word's first piece and of its later ones."""
BY_RANGE = 1_000
"""As many characters as become the same are written as ranges, not one by one."""
APART = "\u16a0"
"""A letter that stays what it is, and that nothing else becomes."""


@dataclass(frozen=True)
class Characters:
    """The strings that a tokenizer makes of each character before it looks for pieces."""

    becomes: dict[str, str]
    """By character, where it isn't itself."""
    signs: frozenset[str]
    """Those that are words by themselves."""
    spaces: frozenset[str]


@cache
def characters(normalizer: str, pre_tokenizer: str) -> Characters:
    """Ask these parts of a tokenizer.json, JSON both. All characters stand between letters that change nothing."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    described = {**json.loads(tokenizer.to_str()), "normalizer": json.loads(normalizer)}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**described, "pre_tokenizer": json.loads(pre_tokenizer)}))
    becomes: dict[str, str] = {}
    signs: set[str] = set()
    spaces: set[str] = set()
    for some in _every():
        # Most are letters that stay, or have no character and go, thousands side by side: there one look is enough.
        together = "".join(some)
        left = tokenizer.normalizer.normalize_str(together)
        if not left:
            becomes.update(dict.fromkeys(some, ""))
            continue
        if left == together and tokenizer.pre_tokenizer.pre_tokenize_str(left) == [(left, (0, len(left)))]:
            continue
        texts = tokenizer.normalizer.normalize_str(APART.join(some)).split(APART)
        if texts != some:
            becomes.update((a, b) for a, b in zip(some, texts, strict=True) if a != b)
        made = sorted(set("".join(texts)))
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(APART.join(["", *made, ""]))
        if len(pieces) > 1:
            signs.update(piece for piece, (begin, _) in pieces if len(piece) == 1 and begin % 2)
            spaces.update(set(made).difference(*(piece for piece, _ in pieces)))
    return Characters(becomes, frozenset(signs), frozenset(spaces))


def _every(size: int = 4096) -> Iterator[list[str]]:
    """Yield all characters but `APART`, so many at a time."""
    for begin in range(0, 0x110000, size):
        codes = (code for code in range(begin, begin + size) if not 0xD800 <= code < 0xE000 and code != ord(APART))
        if some := list(map(chr, codes)):
            yield some


class WordPieceOps:
    """The tokenizer of a tokenizer.json, in a graph: the same ids for every text."""

    def __init__(self, tokenizer: str, most: int, prompt: str = ""):
        """most: tokens of a text that are read. prompt: text before each. `UserError` for another kind of tokenizer."""
        specification = json.loads(tokenizer)
        _check_kind(specification)
        model = specification["model"]
        self.most, self.prompt = most, prompt
        self.vocabulary: dict[str, int] = model["vocab"]
        self.prefix, self.longest_word = model["continuing_subword_prefix"], model["max_input_chars_per_word"]
        self.unknown = self.vocabulary[model["unk_token"]]
        self.pad, self.first, self.last = _template(tokenizer)
        parts = (json.dumps(specification[name]) for name in ("normalizer", "pre_tokenizer"))
        self.characters = characters(*parts)
        self._read_vocabulary()
        self._read_characters()

    def _read_vocabulary(self) -> None:
        """Number the symbols, and lay out the trie of the pieces that can be found."""
        signs, spaces = self.characters.signs, self.characters.spaces
        letters = sorted({letter for token in self.vocabulary for letter in token} - spaces)
        self.symbols = {letter: i for i, letter in enumerate(letters, start=1 + SIGN)}
        self.is_sign = np.array([False, False, False, True, *(letter in signs for letter in letters)])
        children: dict[tuple[int, int], int] = {}
        ids = [-1] * (1 + CONTINUE)
        self.longest = 1
        for token, id in self.vocabulary.items():
            continues = token.startswith(self.prefix) and len(token) > len(self.prefix)
            for root, text in ((BEGIN, token), *([(CONTINUE, token[len(self.prefix) :])] if continues else [])):
                if spaces & set(text) or (len(text) > 1 and signs & set(text)):
                    continue  # in no word
                node = root
                for letter in text:
                    node = children.setdefault((node, self.symbols[letter]), len(ids))
                    if node == len(ids):
                        ids.append(-1)
                ids[node] = id
                self.longest = max(self.longest, len(text))
        self.children, self.ids = children, ids
        becomes = self.characters.becomes
        left = {unicodedata.combining(c) for c in letters if c not in becomes} - {0}
        if "\xe9" in becomes and len(left) > 1:  # accents are taken off, and these aren't among them
            raise UserError(
                "tokenizer.json: its pieces hold marks of several classes, whose order Unicode's decomposition changes;"
                " text in a graph has no operator for that: export a folder"
            )

    def _read_characters(self) -> None:
        """Number the ways to become symbols, and say for each character which is its own."""
        known, signs, spaces = self.symbols, self.characters.signs, self.characters.spaces

        def symbol(letter: str) -> int:
            return SPACE if letter in spaces else known.get(letter, SIGN if letter in signs else LETTER)

        itself = [*known, *signs, *spaces, APART]
        becomes = {**{c: c for c in itself}, **self.characters.becomes}
        members: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for character, text in becomes.items():
            members[tuple(map(symbol, text))].append(character)
        members.pop((LETTER,), None)  # as all others become
        self.ways = [(LETTER,), *members]
        self.of_each = {c: i for i, way in enumerate(self.ways) if len(members[way]) < BY_RANGE for c in members[way]}
        self.by_range = {i: way for i, way in enumerate(self.ways) if len(members[way]) >= BY_RANGE}
        self.ranges = {i: _ranges(members[way]) for i, way in self.by_range.items()}

    def encode(self, op: Op, text: ir.Value) -> Lines:
        """
        text (B,) --> symbols (N,) --> longest piece from each --> those from a word's start on --> ids (B, L)
        """
        symbols, rows = self._symbols(op, text)
        space = op.Equal(symbols, SPACE)
        apart = op.Or(space, op.Gather(table(op, "text.signs", lambda: self.is_sign), symbols))
        # A sign or a letter behind a space or a sign, or a sign: a word begins. Each text ends with a space.
        before = op.Concat([True], op.Slice(apart, [0], [-1], [0]), axis=0)
        begins = op.And(op.Not(space), op.Or(apart, before))
        pieces, lengths = self._longest_pieces(op, symbols, begins)
        reached = self._reached(op, begins, op.Or(begins, space), lengths)
        word = op.Max(op.Sub(op.CumSum(integer(op, begins), 0), 1), 0)
        # More than a word may have of either: characters, or one place from which no piece goes on.
        lost = op.And(reached, op.Equal(lengths, 0))
        counted = op.Add(integer(op, op.Not(space)), op.Mul(integer(op, lost), self.longest_word))
        none = op.Mul(symbols, 0)
        unknown = op.Greater(op.ScatterElements(none, word, counted, axis=0, reduction="add"), self.longest_word)
        unknown = op.Gather(unknown, word)
        written = op.And(reached, op.Or(begins, op.Not(unknown)))
        place = op.Squeeze(op.NonZero(written), [0])
        ids = op.Gather(op.Where(unknown, self.unknown, pieces), place)
        return self._lines(op, ids, op.Gather(rows, place), op.Shape(text))

    def _symbols(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return texts (B,) -> their symbols (N,) and to which of them each belongs (N,)."""
        text = op.StringConcat(strings(op, "text.prompt", [self.prompt]), text)
        text = op.StringConcat(text, strings(op, "text.end", [" "]))
        parts = op.Tokenizer(text, mark=0, mincharnum=1, pad_value="", separators=[""], _domain=ONNXRUNTIME)
        parts.type, parts.shape = ir.TensorType(ir.DataType.STRING), ir.Shape([None, None])
        keys = {"": len(self.ways), **self.of_each}
        way = op.LabelEncoder(
            parts,
            keys_strings=list(keys),
            values_int64s=list(keys.values()),
            default_int64=-1,
            _domain=MACHINE_LEARNING,
        )
        way.type, way.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([None, None])
        place = op.Transpose(op.NonZero(op.Less(way, 0)), perm=[1, 0])
        others = op.GatherND(parts, place)
        ids = op.Expand(0, op.Shape(others))
        for i, pattern in self.ranges.items():
            ids = op.Where(op.RegexFullMatch(others, pattern=pattern), i, ids)
        way = op.ScatterND(way, place, ids)
        most = max(map(len, self.ways))
        rows = [[*way, *[NOTHING] * (most - len(way))] for way in (*self.ways, ())]
        symbols = op.Gather(table(op, "text.ways", lambda: np.array(rows, np.int64)), way)  # (B, C, M)
        width = op.Mul(op.Shape(parts, start=1), most)
        symbols = op.Reshape(symbols, [-1])
        place = op.Squeeze(op.NonZero(symbols), [0])
        return op.Gather(symbols, place), op.Div(place, width)

    def _longest_pieces(self, op: Op, symbols: ir.Value, begins: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the longest piece from each place, and how many symbols it has; 0 where there is none."""
        width = len(self.symbols) + 1 + SIGN
        # A letter behind a word's end is no child of any node.
        ahead = op.Concat(op.Where(begins, SPACE, symbols), [SPACE] * self.longest, axis=0)
        count = op.Shape(symbols)

        def child(op: Op, node: ir.Value, symbol: ir.Value) -> ir.Value:
            edges = [(node * width + letter, after) for (node, letter), after in self.children.items()]
            node_after = op.LabelEncoder(
                op.Add(op.Mul(node, width), symbol),
                keys_int64s=[key for key, _ in edges],
                values_int64s=[after for _, after in edges],
                default_int64=DEAD,
                _domain=MACHINE_LEARNING,
            )
            node_after.type, node_after.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([None])
            return node_after

        ids = table(op, "text.pieces", lambda: np.array(self.ids, np.int64))
        root = op.Where(begins, BEGIN, CONTINUE)

        def body(op: Op, values: State) -> tuple[ir.Value, State, list[ir.Value]]:
            at = op.Unsqueeze(values["iteration"], [0])
            further = op.Slice(ahead, at, op.Add(at, count), [0])
            symbol = op.Where(op.Equal(at, 0), symbols, further)
            node = child(op, values["node"], symbol)
            id = op.Gather(ids, node)
            ends = op.GreaterOrEqual(id, 0)
            after = {
                "node": node,
                "piece": op.Where(ends, id, values["piece"]),
                "length": op.Where(ends, op.Add(at, 1), values["length"]),
            }
            return op.Greater(op.ReduceMax(node, keepdims=0), DEAD), after, []

        integer, none = ir.DataType.INT64, op.Mul(symbols, 0)
        carried = {name: Carried(none, integer, ("symbols",)) for name in ("piece", "length")}
        carried = {"node": Carried(root, integer, ("symbols",)), **carried}
        result, _ = looped(op, "pieces", op.Constant(value_int=self.longest), carried, body)
        return result["piece"], result["length"]

    def _reached(self, op: Op, begins: ir.Value, barred: ir.Value, lengths: ir.Value) -> ir.Value:
        """Return at which places (N,) a piece begins: those of words, and from each one that behind its piece, which by
        doubling takes as many steps as the longest word's number of symbols has binary digits. barred: other words."""
        count = op.Size(lengths)
        place = op.Range(0, count, 1)
        after = op.Add(place, lengths)
        stops = op.Or(op.Equal(lengths, 0), op.Gather(op.Concat(barred, [True], axis=0), after))
        # One more place, from which nothing goes on, and which is no one's.
        jump = op.Concat(op.Where(stops, count, after), op.Reshape(count, [1]), axis=0)
        reached = op.Concat(integer(op, begins), [0], axis=0)
        for _ in range(int(self.longest_word).bit_length()):
            reached = op.ScatterElements(reached, jump, reached, axis=0, reduction="max")
            jump = op.Gather(jump, jump)
        return op.Cast(op.Slice(reached, [0], [-1], [0]), to=ir.DataType.BOOL)

    def _lines(self, op: Op, ids: ir.Value, rows: ir.Value, size: ir.Value) -> Lines:
        """Return ids (T,) and their texts -> rows (B, L) with the first token, the last one and padding. size: B
        (1,)."""
        count = op.ScatterElements(op.Expand(0, size), rows, op.Add(op.Mul(rows, 0), 1), axis=0, reduction="add")
        start = op.CumSum(count, 0, exclusive=1)
        count = op.Min(count, self.most - 2)
        width = padded_width(op, op.Add(op.ReduceMax(count, keepdims=0), 2), self.most)
        # A value before the first, so that there is one to read for the column of the first token.
        values = op.Concat([self.first], ids, [self.last], axis=0)
        ids, column = rows_of(op, values, start, op.Add(count, 1), self.pad, width)
        end = op.Unsqueeze(op.Add(count, 1), [1])
        ids = op.Where(op.Equal(column, 0), self.first, op.Where(op.Equal(column, end), self.last, ids))
        return Lines(ids, integer(op, op.LessOrEqual(column, end)), op.Equal(count, 0))


def _check_kind(specification: dict[str, Any]) -> None:
    """Raise `UserError` for a tokenizer that isn't made of these parts."""
    kinds = {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer", "model": "WordPiece"}
    types = {name: (specification.get(name) or {}).get("type") for name in kinds}
    added = [entry["content"] for entry in specification.get("added_tokens") or () if not entry.get("special")]
    if types != kinds or added:
        has = f"added tokens, {added[0]!r}" if types == kinds else ", ".join(str(kind) for kind in types.values())
        raise UserError(
            f"tokenizer.json: text in a graph of an encoder needs {', '.join(kinds.values())}, and this one has {has}:"
            " export a folder, which takes text in Python and in the browser"
        )


def _template(tokenizer: str) -> tuple[int, int, int]:
    """Return the ids of padding, and of what stands before and behind a text. `UserError` unless one token does
    each."""
    from mlx_transformer.core.tokenizer import Tokenizer

    ours = Tokenizer(tokenizer)
    if len(around := ours.encode("")) != 2:
        raise UserError(f"tokenizer.json: a text without words is {len(around)} tokens; a graph takes one at each end")
    return ours.pad_id, around[0], around[1]


def _ranges(members: Sequence[str]) -> str:
    """Return a regular expression (RE2's) that one of these characters matches."""
    codes = np.array(sorted(map(ord, members)))
    ends = np.flatnonzero(np.diff(codes) > 1)
    first, last = codes[[0, *(ends + 1)]], codes[[*ends, len(codes) - 1]]
    return "[" + "".join(rf"\x{{{a:x}}}-\x{{{b:x}}}" for a, b in zip(first, last, strict=True)) + "]"
