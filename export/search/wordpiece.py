"""WordPiece in a graph, text to ids, for published encoders such as BERT.

It takes a tokenizer.json of BertNormalizer, BertPreTokenizer and WordPiece, and uses ONNX's operators and ONNX
Runtime's `Tokenizer`, which splits text into characters.

At export, `tokenizers` itself is asked about each of the 1,112,064 characters: is it lower-cased, decomposed, removed,
or a word by itself? So the graph agrees with it in every version of Unicode. A trie finds the longest piece from all
places at once (Song et al. 2021, "Fast WordPiece Tokenization", section 3.1). The pieces that follow each other from a
word's beginning are its tokens.

onnxruntime-extensions is needed only where a maker added tokens, and its operators for WordPiece fail. BertTokenizer
keeps the vowel sign of the Lao U+0E84 U+0EB5 when accents are removed, and takes two texts at most. WordpieceTokenizer
tokenizes the three letters A, U+0302, u as `A` and [UNK], instead of a single [UNK], if no piece continues with U+0302.
HfJsonTokenizer doesn't know WordPiece.

Shapes: B texts, W their parts (`text.Parts`), C characters of the longest, M symbols of a character, N symbols of all
texts, L tokens of the longest.
"""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import tokenizers

from export.nn.primitives import END, Op, table
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .steps import Carried, State, looped
from .text import custom, integer, lines_of, parts_of, ranges, replaced, strings, value_of

NOTHING, SPACE, LETTER, SIGN = range(4)
"""The first symbols: padding, a space, and characters in no piece, within a word (LETTER) or a word by themselves
(SIGN)."""
DEAD, BEGIN, CONTINUE = range(3)
"""The first nodes of the trie: a dead end, and the roots for a word's first piece and for its later pieces."""
BY_RANGE = 1_000
"""Groups of at least this many characters with the same symbols are matched by a regular expression, smaller groups in
a hash table."""
APART = "\u16a0"
"""A letter unchanged by normalisation, and not the result of any other character."""


@dataclass(frozen=True)
class Characters:
    """The effect of a tokenizer on single characters, before it looks for pieces."""

    becomes: dict[str, str]
    """Changed characters, e.g. {"A": "a"}."""
    signs: frozenset[str]
    """Characters that are words by themselves, e.g. "!"."""
    spaces: frozenset[str]


@cache
def characters(normalizer: str, pre_tokenizer: str) -> Characters:
    """Find out what these two parts of a tokenizer.json (as JSON) do to each character. It is tested between unchanging
    letters."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    parts = {"normalizer": json.loads(normalizer), "pre_tokenizer": json.loads(pre_tokenizer)}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), **parts}))
    normalized, words = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    becomes: dict[str, str] = {}
    signs: set[str] = set()
    spaces: set[str] = set()
    for some in _every():
        # Most blocks are all unchanged letters, or all removed characters: a single call tells.
        together = "".join(some)
        left = normalized(together)
        if not left or (left == together and words(left) == [(left, (0, len(left)))]):
            becomes |= {} if left else dict.fromkeys(some, "")
            continue
        texts = normalized(APART.join(some)).split(APART)
        becomes |= {a: b for a, b in zip(some, texts, strict=True) if a != b}
        made = sorted(set("".join(texts)))
        pieces = words(APART.join(["", *made, ""]))
        if len(pieces) > 1:
            signs.update(piece for piece, (begin, _) in pieces if len(piece) == 1 and begin % 2)
            spaces.update(set(made).difference(*(piece for piece, _ in pieces)))
    return Characters(becomes, frozenset(signs), frozenset(spaces))


def _every(size: int = 4096) -> Iterator[list[str]]:
    """All characters except `APART`, in lists of at most `size`."""
    for begin in range(0, 0x110000, size):
        codes = (code for code in range(begin, begin + size) if not 0xD800 <= code < 0xE000 and code != ord(APART))
        if some := list(map(chr, codes)):
            yield some


class WordPieceOps:
    """The tokenizer of a tokenizer.json in a graph, with the same ids for every text."""

    def __init__(self, tokenizer: str, most: int, prompt: str = ""):
        """most: tokens to read of a text, including the special tokens. prompt: put before each text.

        Raises UserError for a tokenizer of another kind.
        """
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
        self._read_added(tokenizer)
        self._read_vocabulary()
        self._read_characters()

    def _read_added(self, tokenizer: str) -> None:
        """Tokens that the maker added, with their spellings in the text that they are looked for in."""
        becomes, added = self.characters.becomes, Tokenizer(tokenizer).added
        self.typed = [token for token in added if not token.normalized]
        self.normal = [
            token._replace(content="".join(becomes.get(letter, letter) for letter in token.content))
            for token in added
            if token.normalized
        ]
        again = [c for text in {*becomes.values()} for c in text if becomes.get(c, c).strip() != c.strip()]
        if again and self.normal:
            raise UserError(
                f"tokenizer.json: the added token {self.normal[0].content!r:.60} is looked for in text whose"
                f" {again[0]!r} is then changed again, which no operator does: export a folder"
            )

    def _read_vocabulary(self) -> None:
        """Number the symbols, and build the trie of all pieces possible in a word."""
        signs, spaces, becomes = self.characters.signs, self.characters.spaces, self.characters.becomes
        letters = sorted({letter for token in self.vocabulary for letter in token} - spaces)
        left = {unicodedata.combining(c) for c in letters if c not in becomes} - {0}
        if "\xe9" in becomes and len(left) > 1:  # accents are removed, but not these
            raise UserError(
                "tokenizer.json: its pieces hold marks of several classes, whose order Unicode's decomposition changes;"
                " text in a graph has no operator for that: export a folder"
            )
        self.symbols = {letter: i for i, letter in enumerate(letters, start=1 + SIGN)}
        self.is_sign = np.array([False, False, False, True, *(letter in signs for letter in letters)])
        pieces = {(BEGIN, token): id for token, id in self.vocabulary.items()}
        later = {t.removeprefix(self.prefix): id for t, id in self.vocabulary.items() if t.startswith(self.prefix)}
        pieces |= {(CONTINUE, text): id for text, id in later.items()}
        in_words = (p for p in pieces if p[1] and not spaces & set(p[1]) and (len(p[1]) == 1 or not signs & set(p[1])))
        pieces = {piece: pieces[piece] for piece in in_words}
        beginnings = dict.fromkeys((root, text[:end]) for root, text in pieces for end in range(1, len(text) + 1))
        nodes = {beginning: node for node, beginning in enumerate(beginnings, start=1 + CONTINUE)}
        self.longest = max((len(text) for _, text in pieces), default=1)
        self.width = len(self.symbols) + 1 + SIGN
        self.edges = {
            nodes.get((root, text[:-1]), root) * self.width + self.symbols[text[-1]]: node
            for (root, text), node in nodes.items()
        }
        """{node * width + symbol: the next node}"""
        self.ids = np.full(1 + CONTINUE + len(nodes), -1, np.int64)
        self.ids[[nodes[piece] for piece in pieces]] = list(pieces.values())
        """The id of the piece that ends at a node, otherwise -1."""

    def _read_characters(self) -> None:
        """Collect the distinct rows of symbols for characters, and find each character's row."""
        known, signs, spaces = self.symbols, self.characters.signs, self.characters.spaces

        def symbol(letter: str) -> int:
            return SPACE if letter in spaces else known.get(letter, SIGN if letter in signs else LETTER)

        becomes = {**{c: c for c in (*known, *signs, *spaces, APART)}, **self.characters.becomes}
        members: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for character, text in becomes.items():
            members[tuple(map(symbol, text))].append(character)
        members.pop((LETTER,), None)  # all other characters
        self.rows = [(LETTER,), *members]
        self.row_of = {c: i for i, row in enumerate(self.rows) if len(members[row]) < BY_RANGE for c in members[row]}
        self.row_ranges = {
            i: f"[{ranges(members[row])}]" for i, row in enumerate(self.rows) if len(members[row]) >= BY_RANGE
        }

    def encode(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
        """
        text (B,) --> symbols (N,) --> longest piece from each --> pieces from word starts on --> ids, mask (B, L)
        """
        text, parts = op.StringConcat(strings(op, "text.prompt", [self.prompt]), text), None
        if self.typed or self.normal:
            parts = parts_of(op, text, "typed", self.typed)
            text = parts.without_tokens(op)
        if parts is not None and self.normal:
            text = parts.without_tokens(op, self._normalized(op, text))
            parts = parts.apart(op, parts_of(op, text, "normal", self.normal))
            text = parts.without_tokens(op)
        symbols, line = self._symbols(op, text)
        space = op.Equal(symbols, SPACE)
        apart = op.Or(space, op.Gather(table(op, "text.signs", lambda: self.is_sign), symbols))
        # A word begins with a sign, and after a space or a sign. Each text ends with a space.
        before = op.Concat([True], op.Slice(apart, [0], [-1], [0]), axis=0)
        begins = op.And(op.Not(space), op.Or(apart, before))
        pieces, lengths = self._longest_pieces(op, symbols, begins)
        reached = self._reached(op, begins, op.Or(begins, space), lengths)
        # A word is unknown if it has too many characters, or if no piece continues at one of its places.
        lost = op.And(reached, op.Equal(lengths, 0))
        counted = op.Add(integer(op, op.Not(space)), op.Mul(integer(op, lost), self.longest_word))
        word = op.Max(op.Sub(op.CumSum(integer(op, begins), 0), 1), 0)
        total = op.ScatterElements(op.Mul(symbols, 0), word, counted, axis=0, reduction="add")
        unknown = op.Gather(op.Greater(total, self.longest_word), word)
        written = op.And(reached, op.Or(begins, op.Not(unknown)))
        place = op.Squeeze(op.NonZero(written), [0])
        ids = op.Gather(op.Where(unknown, self.unknown, pieces), place)  # of all texts
        line = op.Gather(line, place)
        count = op.Expand(0, op.Shape(text))
        count = op.ScatterElements(count, line, op.Add(op.Mul(line, 0), 1), axis=0, reduction="add")  # (B,)
        start = op.CumSum(count, 0, exclusive=1)
        if parts is not None:  # a token is one point in its part
            added = op.Gather(parts.ids, line)
            ids = op.Where(op.Less(added, 0), ids, added)
            ends = op.Gather(start, parts.first)  # (B+1,)
            start = op.Slice(ends, [0], [-1], [0])
            count = op.Sub(op.Slice(ends, [1], [END], [0]), start)
        count = op.Min(count, self.most - 2)
        return lines_of(op, ids, start, count, [[self.first]], [[self.last]], self.pad, self.most)

    def _symbols(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Texts (B,) to symbols (N,), and the index of each symbol's text (N,)."""
        parts = _letters(op, op.StringConcat(text, strings(op, "text.end", [" "])))  # (B, C)
        found = value_of(op, parts, {"": len(self.rows), **self.row_of}, -1, rank=2)
        place = op.Transpose(op.NonZero(op.Less(found, 0)), perm=[1, 0])
        others = op.GatherND(parts, place)
        by_range = op.Expand(0, op.Shape(others))
        for i, pattern in self.row_ranges.items():
            by_range = op.Where(op.RegexFullMatch(others, pattern=pattern), i, by_range)
        found = op.ScatterND(found, place, by_range)
        most = max(map(len, self.rows))
        rows = [[*row, *[NOTHING] * (most - len(row))] for row in (*self.rows, ())]
        symbols = op.Gather(table(op, "text.rows", lambda: np.array(rows, np.int64)), found)  # (B, C, M)
        symbols = op.Reshape(symbols, [-1])
        place = op.Squeeze(op.NonZero(symbols), [0])
        return op.Gather(symbols, place), op.Div(place, op.Mul(op.Shape(parts, start=1), most))

    def _normalized(self, op: Op, text: ir.Value) -> ir.Value:
        """Texts (W,) as added tokens are looked for in them."""
        letters = _letters(op, op.StringConcat(text, strings(op, "text.apart", [APART])))  # (W, C)
        members: dict[str, list[str]] = defaultdict(list)
        for letter, becomes in self.characters.becomes.items():
            members[becomes].append(letter)
        made = [*members]
        few = {c: i for i, text in enumerate(made) if len(members[text]) < BY_RANGE for c in members[text]}
        found = value_of(op, letters, few, -1, rank=2)
        for i, some in enumerate(members.values()):
            if len(some) >= BY_RANGE:
                found = op.Where(op.RegexFullMatch(letters, pattern=f"[{ranges(some)}]"), i, found)
        changed = op.Gather(strings(op, "text.made", made), op.Max(found, 0))
        letters = op.Where(op.Less(found, 0), letters, changed)
        text = custom(op, "StringJoin", letters, strings(op, "text.nothing", [""]), [1], kinds="S")
        return replaced(op, text, "apart", f"{APART}$", "")

    def _longest_pieces(self, op: Op, symbols: ir.Value, begins: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The longest piece from each place (N,), and its number of symbols; 0 if there is none."""
        # No node continues with a space, so no piece runs into the next word.
        ahead = op.Concat(op.Where(begins, SPACE, symbols), [SPACE] * self.longest, axis=0)
        count, ids = op.Shape(symbols), table(op, "text.pieces", lambda: self.ids)

        def body(op: Op, values: State) -> tuple[ir.Value, State, list[ir.Value]]:
            at = op.Unsqueeze(values["iteration"], [0])
            symbol = op.Where(op.Equal(at, 0), symbols, op.Slice(ahead, at, op.Add(at, count), [0]))
            node = value_of(op, op.Add(op.Mul(values["node"], self.width), symbol), self.edges, DEAD)
            id = op.Gather(ids, node)
            ends = op.GreaterOrEqual(id, 0)
            piece, length = op.Where(ends, id, values["piece"]), op.Where(ends, op.Add(at, 1), values["length"])
            more = op.Greater(op.ReduceMax(node, keepdims=0), DEAD)
            return more, {"node": node, "piece": piece, "length": length}, []

        none = op.Mul(symbols, 0)
        starts = {"node": op.Where(begins, BEGIN, CONTINUE), "piece": none, "length": none}
        carried = {name: Carried(start, ir.DataType.INT64, ("symbols",)) for name, start in starts.items()}
        result, _ = looped(op, "pieces", op.Constant(value_int=self.longest), carried, body)
        return result["piece"], result["length"]

    def _reached(self, op: Op, begins: ir.Value, barred: ir.Value, lengths: ir.Value) -> ir.Value:
        """Whether a piece of a word begins at a place (N,): at the word's start, and after each piece that begins at
        such a place.

        Found by doubling, in as many steps as the longest word's length has binary digits. barred: starts of other
        words, and spaces.
        """
        count = op.Size(lengths)
        after = op.Add(op.Range(0, count, 1), lengths)
        stops = op.Or(op.Equal(lengths, 0), op.Gather(op.Concat(barred, [True], axis=0), after))
        # Dead ends jump to one extra place at the end.
        jump = op.Concat(op.Where(stops, count, after), op.Reshape(count, [1]), axis=0)
        reached = op.Concat(integer(op, begins), [0], axis=0)
        for _ in range(int(self.longest_word).bit_length()):
            reached = op.ScatterElements(reached, jump, reached, axis=0, reduction="max")
            jump = op.Gather(jump, jump)
        return op.Cast(op.Slice(reached, [0], [-1], [0]), to=ir.DataType.BOOL)


def _letters(op: Op, text: ir.Value) -> ir.Value:
    """Text (B,) to characters (B, C), "" behind the last. No text may be empty."""
    apart: dict[str, Any] = dict(mark=0, mincharnum=1, pad_value="", separators=[""])
    return custom(op, "Tokenizer", text, **apart, kinds="S", shape=(None, None))


def _check_kind(specification: dict[str, Any]) -> None:
    """Raise UserError for a tokenizer with other parts."""
    kinds = {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer", "model": "WordPiece"}
    types = {name: (specification.get(name) or {}).get("type") for name in kinds}
    if types != kinds:
        has = ", ".join(str(kind) for kind in types.values())
        raise UserError(
            f"tokenizer.json: text in a graph of an encoder needs {', '.join(kinds.values())}, and this one has {has}:"
            " export a folder, which takes text in Python and in the browser"
        )


def _template(tokenizer: str) -> tuple[int, int, int]:
    """Ids of padding, and of the tokens before and after a text."""
    ours = Tokenizer(tokenizer)
    if len(around := ours.encode("")) != 2:
        raise UserError(f"tokenizer.json: a text without words is {len(around)} tokens; a graph takes one at each end")
    return ours.pad_id, around[0], around[1]
