"""Text in and out of a search graph: the base class of all tokenizers in graphs, byte-level BPE, added tokens.

`BytePairOps` reads vocabularies of `train`, with the same ids and texts as `text/tokenizer.py`. `ByteLevelOps`
splits words as GPT-2 does, for BART. SentencePiece is in `pieces.py`, BERT's WordPiece in `wordpiece.py`.

Four operators of onnxruntime-extensions (0.15.2) are used: HfJsonTokenizer merges bytes, StringRegexSplitWithOffsets
and StringRegexReplace use RE2, StringJoin joins texts. Its other operators fail: HfJsonTokenizer can't compile our
SPLIT_PATTERN, GPT2Tokenizer separates e from U+0301, and RobertaTokenizer takes the text `</s>` for the token.
BpeDecoder returns `abcd` for the first of two rows `ab` and `cd`, and the byte 0xFF unchanged instead of U+FFFD.

A text is first split at the tokens that a model's maker added, as in `text/added_tokens.py`.

Shapes: B lines, S longest line in tokens, N tokens of all lines (or bytes of all texts), P and Q ids around a line, W
words of all lines, n hypotheses, T their tokens.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import tokenizers
from tokenizers import normalizers

from export.nn.primitives import END, Op, scope, table
from export.targets.portable.runtime import SOURCE_MULTIPLE
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.generation.translate import fitting_tokenizer
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.added_tokens import AddedToken
from mlx_transformer.text.tokenizer import MASK_TOKEN, MIN_VOCAB_SIZE, Tokenizer

from .metadata import TEXT_DOMAIN

DOMAINS = {"LabelEncoder": ("ai.onnx.ml", 2), "Tokenizer": ("com.microsoft", 1)}
"""Domains and versions of operators outside ONNX's main domain; operators not listed are onnxruntime-extensions'."""
SEPARATOR, REPLACEMENT, NOTHING = range(256, 259)
"""Codes after the 256 bytes: a separator of texts, U+FFFD, and a byte already covered by a preceding U+FFFD."""
CODE_TEXTS = [*(bytes([byte]) for byte in range(256)), b"", "\ufffd".encode(), b""]
"""The UTF-8 of each code."""

PIECES = r"(\p{Z}?\P{Z}{1,32}|\p{Z}{1,32})"
"""Splits the matches of `words_pattern` to the lengths of SPLIT_PATTERN."""
BLANK = "[\t-\r\x1c-\x1f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"
"""A blank line: only characters that str.strip() removes. Its translation is empty."""
WHITE = r"\s\pZ\x{b}\x{85}"
"""White space, as members of an RE2 class."""
FAST = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<pad>"})
"""The tokenizer_config.json that HfJsonTokenizer needs beside a tokenizer.json."""


class TextOps(ABC):
    """A tokenizer as operators. Subclasses split text into tokens (`cut`), and spell tokens (`spell`)."""

    size: int
    """The model's number of ids. `size` itself is an extra id, which ends every text and has no spelling."""
    positions: int
    pad: int
    before: list[int] | None = None
    """Ids before each line's tokens, e.g. [<s>]."""
    after: list[int] | None = None
    alone: int | None = None
    """The id of an empty prompt, in a column before the others; None: each line has tokens."""

    @abstractmethod
    def cut(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Text (B,) to the tokens of all lines (N,), where each line starts (B,), and its number of tokens (B,)."""

    @abstractmethod
    def spell(self, op: Op, tokens: ir.Value) -> ir.Value:
        """Tokens (R, T) to strings (R, any number); joined, they are the text of each row."""

    def encode(
        self, op: Op, text: ir.Value, prefix: ir.Value | None = None, suffix: ir.Value | None = None
    ) -> tuple[ir.Value, ir.Value]:
        """Text (B,) to ids and mask (B, S). prefix (P,) and suffix (Q,) go around each line, e.g. a language's id."""
        before, after = [prefix, self.before], [self.after, suffix]
        ids, mask = lines_of(op, *self.cut(op, text), before, after, self.pad, self.positions)
        if self.alone is None:
            return ids, mask
        empty = op.Equal(op.ReduceSum(mask, [1], keepdims=1), 0)  # (B, 1)
        first = op.Where(empty, self.alone, self.pad)
        return op.Concat(first, ids, axis=1), op.Concat(integer(op, empty), mask, axis=1)

    def continues(self, known: Tokenizer) -> None:
        """Set up prompts of a decoder: no end token, and a start token if the vocabulary uses one."""
        self.before, self.after = known.start or None, None
        self.alone = None if self.before else known.bos_id

    def decode(self, op: Op, sequences: ir.Value, blank: ir.Value) -> ir.Value:
        """Ids (B, n, T) to texts (B, n), empty where the source line is blank (B,)."""
        shape = op.Shape(sequences, start=0, end=2)  # (2,): B, n
        ends = op.Expand(self.size, op.Concat(shape, [1], axis=0))
        tokens = op.Concat(op.Where(op.Unsqueeze(blank, [1, 2]), self.size, sequences), ends, axis=2)
        tokens = op.Reshape(tokens, op.Concat([-1], op.Shape(tokens, start=2), axis=0))  # (B*n, T+1)
        nothing = strings(op, "text.nothing", [""])
        return op.Reshape(custom(op, "StringJoin", self.spell(op, tokens), nothing, [1], kinds="S"), shape)


class BytePairOps(TextOps):
    """Byte-level BPE as `train` makes it."""

    def __init__(self, tokenizer: str, config: TransformerConfig):
        """tokenizer: text of a tokenizer.json. Raises UserError if it isn't from `train` or doesn't fit the model."""
        known = Tokenizer(tokenizer)
        fitting_tokenizer(config, known, "model", config.architecture, "text")
        specification = json.loads(tokenizer)
        self.size, self.positions = config.vocab_size, config.max_positions
        self.pad, self.after = known.pad_id, [known.eos_id]
        self.added = known.added
        # A text that spells a special token is just text: "</s>" is four characters.
        changed = {"pre_tokenizer": self._words(specification, known), "post_processor": None, "added_tokens": []}
        self.merges = json.dumps({**specification, **changed})
        letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
        spelled = {id: t for t, id in specification["model"]["vocab"].items() if id not in known.special_ids}
        bytes_of = {id: [letters[letter] for letter in token] for id, token in spelled.items()}
        for token in self.added:  # they may have letters that spell no byte
            own = [letters.get(letter, -1) for letter in token.content]
            bytes_of |= {} if token.special else {token.id: list(token.content.encode()) if -1 in own else own}
        self.spelling = np.full((self.size + 1, max(map(len, bytes_of.values()))), -1, np.int16)
        for id, each in bytes_of.items():
            self.spelling[id, : len(each)] = each
        self.spelling[self.size, 0] = SEPARATOR
        if not config.has_encoder:
            self.continues(known)

    def _words(self, specification: dict[str, Any], known: Tokenizer) -> dict[str, Any]:
        """The operator's pre-tokenizer: an expression that matches everything, since its input is already split.
        Without it the operator would split again, as GPT-2 does."""
        trained = json.loads(Tokenizer.train([], MIN_VOCAB_SIZE, mask=known.mask_id is not None).to_json())
        if _behaviour(specification) != _behaviour(trained):
            raise UserError(
                "tokenizer.json: text in a graph needs a tokenizer from `train` or `import`; export without text:"
                " translate and SearchModel take text with that file, too"
            )
        whole = {"type": "Split", "pattern": {"Regex": "[\\s\\S]+"}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [whole, specification["pre_tokenizer"]["pretokenizers"][1]]}

    def cut(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        words, first_words = split(op, text, "words", words_pattern())
        # An extra word after the last line, as the operators fail on an empty list.
        pieces, first_pieces = split(op, op.Concat(words, strings(op, "text.one", ["."]), axis=0), "pieces", PIECES)
        tokens, counts = self._merged(op, pieces)
        starts = op.Gather(op.CumSum(counts, 0, exclusive=1), op.Gather(first_pieces, first_words))  # (B+1,)
        start = op.Slice(starts, [0], [-1], [0])
        return tokens, start, op.Sub(op.Slice(starts, [1], [END], [0]), start)

    def _merged(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Words (W,) to the tokens of all words (N,), and each word's number of tokens (W,)."""
        attributes = dict(tokenizer_config=FAST, tokenizer_vocab=self.merges)
        padded, mask = custom(op, "HfJsonTokenizer", text, **attributes, kinds="II", shape=(None, None))
        return op.GatherND(padded, op.Transpose(op.NonZero(mask), perm=[1, 0])), op.ReduceSum(mask, [1], keepdims=0)

    def spell(self, op: Op, tokens: ir.Value) -> ir.Value:
        """Join the bytes of all rows into one stream, make it valid UTF-8, and split it into rows again."""
        spelled = op.Gather(table(op, "text.bytes", lambda: self.spelling), tokens)  # (R, T, longest token)
        is_byte = op.GreaterOrEqual(spelled, 0)
        count = op.ReduceSum(integer(op, is_byte), [1, 2], keepdims=0)  # (R,)
        stream = integer(op, op.GatherND(spelled, op.Transpose(op.NonZero(is_byte), perm=[1, 0])))
        column = op.Range(0, op.ReduceMax(count, keepdims=0), 1)
        place = op.Add(op.Unsqueeze(op.CumSum(count, 0, exclusive=1), [1]), column)
        codes = op.Concat(well_formed(op, stream), [NOTHING], axis=0)
        codes = op.Gather(codes, op.Where(op.Less(column, op.Unsqueeze(count, [1])), place, -1))
        return op.Gather(strings(op, "text.characters", CODE_TEXTS), codes)


def is_blank(op: Op, text: ir.Value) -> ir.Value:
    """Whether a line has nothing to translate (B,)."""
    return op.RegexFullMatch(text, pattern=BLANK)


def lines_of(
    op: Op,
    tokens: ir.Value,
    start: ir.Value,
    count: ir.Value,
    before: Sequence[ir.Value | list[int] | None],
    after: Sequence[ir.Value | list[int] | None],
    pad: int,
    positions: int,
) -> tuple[ir.Value, ir.Value]:
    """Ids and mask (B, S): line i is `before` (P,), the `count[i]` tokens from `start[i]` on, and `after` (Q,).

    The width is the same as in `Sources.padded`.
    """
    none = table(op, "text.no_ids", lambda: np.zeros(0, np.int64))
    front, back = (op.Concat(none, *(x for x in ids if x is not None), axis=0) for ids in (before, after))
    start, count, around = op.Unsqueeze(start, [1]), op.Unsqueeze(count, [1]), op.Add(op.Size(front), op.Size(back))
    total = op.Add(count, around)  # (B, 1)
    longest = op.ReduceMax(total, keepdims=0)
    rounded = op.Mul(op.Div(op.Add(longest, SOURCE_MULTIPLE - 1), SOURCE_MULTIPLE), SOURCE_MULTIPLE)
    column = op.Range(0, op.Max(longest, op.Min(rounded, positions)), 1)  # (S,)
    mask = op.Less(column, total)
    values = op.Concat(front, back, tokens, [pad], axis=0)
    place = op.Sub(column, op.Size(front))  # index into the line's own tokens
    index = op.Where(op.Less(place, count), op.Add(op.Add(place, start), around), op.Sub(column, count))
    index = op.Where(op.Less(place, 0), column, op.Where(mask, index, -1))
    return op.Gather(values, index), integer(op, mask)


def well_formed(op: Op, stream: ir.Value) -> ir.Value:
    """Bytes and separators (N,) to codes (N,) of valid UTF-8: each ill-formed part becomes one U+FFFD.

    Parts are cut as in Rust and the Unicode Standard (chapter 3.9, "U+FFFD Substitution of Maximal Subparts").
    """
    names = ("utf8.needs", "utf8.low", "utf8.high")
    tables = (table(op, name, lambda row=row: lead_bytes()[row]) for row, name in enumerate(names))
    needs, low, high = (op.Gather(values, stream) for values in tables)
    continued: list[ir.Value] = []  # k-th entry: at least k bytes follow correctly
    for k in (1, 2, 3):
        byte = op.Slice(op.Concat(stream, [SEPARATOR] * k, axis=0), [k], [END], [0])  # the k-th after each
        fits = op.And(op.And(op.GreaterOrEqual(byte, low), op.LessOrEqual(byte, high)), op.GreaterOrEqual(needs, k))
        continued.append(op.And(continued[-1], fits) if continued else fits)
        low, high = 0x80, 0xBF
    one, two, three = (integer(op, x) for x in continued)
    complete = op.Equal(op.Add(op.Add(one, two), three), needs)
    code = op.Where(complete, stream, REPLACEMENT)
    for k, reached in enumerate(continued, start=1):
        # The lead byte k places earlier decides: 1 keeps this byte, 2 drops it. No byte has two lead bytes.
        kept = op.Where(reached, op.Where(complete, 1, 2), 0)
        kept = op.Slice(op.Concat([0] * k, kept, axis=0), [0], [-k], [0])
        code = op.Where(op.Equal(kept, 0), code, op.Where(op.Equal(kept, 1), stream, NOTHING))
    return code


def lead_bytes() -> np.ndarray:
    """(3, 257): for each byte the number of bytes that must follow (-1: it can't begin a character), and the lowest and
    highest next byte."""
    table = np.zeros((3, SEPARATOR + 1), np.int64)
    needs, low, high = table
    needs[0x80:0xC2] = needs[0xF5:0x100] = -1
    needs[0xC2:0xE0], needs[0xE0:0xF0], needs[0xF0:0xF5] = 1, 2, 3
    low[:], high[:] = 0x80, 0xBF
    low[0xE0], high[0xED], low[0xF0], high[0xF4] = 0xA0, 0x9F, 0x90, 0x8F
    return table


def _byte_letters() -> str:
    """ByteLevel's letter for each byte (Radford et al. 2019): the byte itself if visible, otherwise from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in visible else next(others)) for byte in range(256))


def _behaviour(specification: dict[str, Any]) -> list[Any]:
    """All settings except the vocabulary, the merges and <mask>'s id. Equal settings split text into equal words."""
    model = {name: value for name, value in specification["model"].items() if name not in ("vocab", "merges")}
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    added = specification.get("added_tokens") or []
    added = [{**entry, "id": "mask"} if entry.get("content") == MASK_TOKEN else entry for entry in added]
    return [model, added, *(specification.get(name) for name in names)]


def words_pattern() -> str:
    """SPLIT_PATTERN without its limits on lengths, which `PIECES` applies: together RE2 would need 80,000 states."""
    letters, numbers = characters_of(r"\p{L}\p{M}"), characters_of(r"\p{N}")
    return rf"([{numbers}]|\p{{Z}}?[{letters}]+|\p{{Z}}?[^{letters}{numbers}\p{{Z}}]+|\p{{Z}}{{1,32}})"


@cache
def characters_of(members: str) -> str:
    r"""The characters of a class in `tokenizers`, e.g. \p{L}, as ranges for RE2, whose version of Unicode is older."""
    others = normalizers.Replace(tokenizers.Regex(f"[^{members}]+"), "")
    return ranges(others.normalize_str("".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))))


def ranges(characters: Iterable[str]) -> str:
    r"""Characters as members of an RE2 class: "abcx" is \x{61}-\x{63}\x{78}-\x{78}."""
    codes = np.array(sorted(map(ord, characters)))
    ends = np.flatnonzero(np.diff(codes) > 1)
    first, last = codes[[0, *(ends + 1)]], codes[[*ends, len(codes) - 1]]
    return "".join(rf"\x{{{a:x}}}-\x{{{b:x}}}" for a, b in zip(first, last, strict=True))


def one_of(texts: Iterable[str]) -> str:
    """An RE2 group that matches any of these texts, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    return "(" + "|".join("".join(rf"\x{{{ord(letter):x}}}" for letter in text) for text in longest_first) + ")"


def split(op: Op, text: ir.Value, name: str, pattern: str) -> tuple[ir.Value, ir.Value]:
    """Split text (B,) at the matches of an expression, and keep matches and gaps: pieces (W,), and each text's first
    piece (B+1,)."""
    patterns = strings(op, f"text.{name}", [pattern]), strings(op, "text.keep", ["(?s).*"])
    pieces, _, _, first = custom(op, "StringRegexSplitWithOffsets", text, *patterns, kinds="SIII")
    return pieces, first


def replaced(op: Op, text: ir.Value, name: str, pattern: str, by: str) -> ir.Value:
    """Replace all matches of an expression in text (B,)."""
    inputs = strings(op, f"text.{name}", [pattern]), strings(op, f"text.{name}.by", [by])
    return custom(op, "StringRegexReplace", text, *inputs, kinds="S")


def strings(op: Op, name: str, values: Sequence[str | bytes]) -> ir.Value:
    """A constant vector of strings; calls with the same name share it in a graph."""
    data = [value.encode() if isinstance(value, str) else value for value in values]
    return table(op, name, lambda: ir.StringTensor(data, shape=ir.Shape([len(data)]), name=name))


def custom(
    op: Op, operator: str, *inputs: Any, kinds: str = "I", shape: Sequence[int | None] = (None,), **attributes: Any
) -> Any:
    """Add an operator outside ONNX's main domain. kinds: a letter per output, S strings, I int64, i int32."""
    domain, version = DOMAINS.get(operator, (TEXT_DOMAIN, 1))
    op.builder.root.graph.opset_imports[domain] = version
    outputs = getattr(op, operator)(*inputs, **attributes, _domain=domain, _outputs=len(kinds))
    outputs = [outputs] if isinstance(outputs, ir.Value) else outputs
    types = {"S": ir.DataType.STRING, "I": ir.DataType.INT64, "i": ir.DataType.INT32}
    for value, kind in zip(outputs, kinds, strict=True):
        value.type, value.shape = ir.TensorType(types[kind]), ir.Shape(shape)
    return outputs if len(kinds) > 1 else outputs[0]


def value_of(
    op: Op, keys: ir.Value, values: Mapping[str, int] | Mapping[int, int], otherwise: int, rank: int = 1
) -> ir.Value:
    """Look up each key in a hash table {key: value}; `otherwise` for other keys."""
    kind = "keys_strings" if isinstance(next(iter(values)), str) else "keys_int64s"
    pairs: dict[str, Any] = {kind: list(values), "values_int64s": list(values.values())}
    return custom(op, "LabelEncoder", keys, **pairs, default_int64=otherwise, shape=(None,) * rank)


def integer(op: Op, x: ir.Value) -> ir.Value:
    return op.Cast(x, to=ir.DataType.INT64)


PYTHONS_WHITE = rf"{WHITE}\x{{1c}}-\x{{1f}}"
"""Characters that Python's str.strip() removes, as members of an RE2 class."""


class Parts(NamedTuple):
    """Lines split at added tokens into W parts, and an extra part at the end, as operators fail on an empty list."""

    text: ir.Value
    """(W+1,)"""
    ids: ir.Value
    """(W+1,): the id of an added token; -1 for text between them."""
    first: ir.Value
    """(B+1,): the first part of each line, and W."""

    def without_tokens(self, op: Op, text: ir.Value | None = None) -> ir.Value:
        """The texts (W+1,), or `text` in their place, with "." for each token."""
        point = strings(op, "text.one", ["."])
        return op.Where(op.GreaterOrEqual(self.ids, 0), point, self.text if text is None else text)

    def apart(self, op: Op, inner: Parts) -> Parts:
        """Insert `inner`, the parts of `without_tokens` split again, with the tokens in their places."""
        place = op.Slice(inner.first, [0], [-1], [0])
        is_token = op.GreaterOrEqual(self.ids, 0)
        place, own = (op.Compress(x, is_token, axis=0) for x in (place, self.ids))
        return Parts(inner.text, op.ScatterElements(inner.ids, place, own, axis=0), op.Gather(inner.first, self.first))

    def begins(self, op: Op) -> ir.Value:
        """Whether a part is the first of its line (W+1,)."""
        none = op.Mul(op.Concat(self.ids, [0], axis=0), 0)
        marked = op.ScatterElements(none, self.first, op.Add(op.Mul(self.first, 0), 1), axis=0)
        return op.Cast(op.Slice(marked, [0], [-1], [0]), to=ir.DataType.BOOL)


def parts_of(op: Op, text: ir.Value, name: str, tokens: Sequence[AddedToken], python: bool = False) -> Parts:
    """Split text (B,) at added tokens. python: as the Python tokenizers of transformers do (`PythonSplitter`)."""
    if not tokens:
        one = strings(op, "text.one", ["."])
        first = op.Range(0, op.Add(op.Squeeze(op.Shape(text), [0]), 1), 1)
        text = op.Concat(text, one, axis=0)
        return Parts(text, op.Expand(-1, op.Shape(text)), first)
    text, first = split(op, text, name, one_of(token.content for token in tokens))
    text = op.Concat(text, strings(op, "text.one", ["."]), axis=0)
    by_id, ids = {token.id: token for token in tokens}, {token.content: token.id for token in tokens}
    parts = Parts(text, value_of(op, text, ids, -1), first)
    if python:
        return _as_in_python(op, name, parts, by_id)
    if any(token.single_word for token in tokens):
        parts = _words_alone(op, parts, by_id)
    begins, is_text, text = parts.begins(op), op.Less(parts.ids, 0), parts.text
    for flag, pattern in {"lstrip": f"[{WHITE}]+$", "rstrip": f"^[{WHITE}]+"}.items():
        if not any(getattr(token, flag) for token in tokens):
            continue
        takes = _flagged(op, parts.ids, by_id, flag)
        beside = _behind(op, takes, begins) if flag == "lstrip" else _before(op, takes, begins)
        text = op.Where(op.And(beside, is_text), replaced(op, text, f"{name}.{flag}", pattern, ""), text)
    return Parts(text, parts.ids, parts.first)


def _words_alone(op: Op, parts: Parts, by_id: dict[int, AddedToken]) -> Parts:
    """Turn tokens of `single_word` beside a letter into text, joined with their neighbours."""
    begins, word = parts.begins(op), word_characters()
    ends_word = custom_match(op, parts.text, f"(?s).*[{word}]")
    starts_word = custom_match(op, parts.text, f"(?s)[{word}].*")
    within = op.Or(_before(op, ends_word, begins), _behind(op, starts_word, begins))
    dropped = op.And(_flagged(op, parts.ids, by_id, "single_word"), within)
    ids = op.Where(dropped, -1, parts.ids)
    is_text = op.Less(ids, 0)
    opens = op.Or(op.Not(is_text), op.Or(begins, op.Not(_before(op, is_text, begins))))
    joined = _joined(op, parts, opens)
    return Parts(joined.text, op.Gather(ids, joined.ids), joined.first)


def _joined(op: Op, parts: Parts, opens: ir.Value) -> Parts:
    """Join each part with the part before it, unless it `opens` a new part (W+1,). Returns S joined parts; their `ids`
    are the places of their first parts."""
    places = op.Range(0, op.Size(opens), 1)
    opens = op.Or(opens, op.Equal(places, op.Sub(op.Size(opens), 1)))  # the extra part at the end
    index = op.Sub(op.CumSum(integer(op, opens), 0), 1)  # (W+1,): the joined part of each part
    start = op.Squeeze(op.NonZero(opens), [0])  # (S,)
    length = op.Sub(op.Concat(op.Slice(start, [1], [END], [0]), op.Reshape(op.Size(opens), [1]), axis=0), start)
    column = op.Range(0, op.ReduceMax(length, keepdims=0), 1)
    place = op.Add(op.Unsqueeze(start, [1]), column)
    place = op.Where(op.Less(column, op.Unsqueeze(length, [1])), place, -1)
    letters = op.Gather(op.Concat(parts.text, strings(op, "text.nothing", [""]), axis=0), place)
    joined = custom(op, "StringJoin", letters, strings(op, "text.nothing", [""]), [1], kinds="S")
    return Parts(joined, start, op.Gather(index, parts.first))


STAYS, STRIPS, EMPTY, LEFT, LEFT_STRIPS, RIGHT = range(6)
"""States of a part in `PythonSplitter`.

STAYS          a part by itself
STRIPS         the same, and the white space after it is removed
EMPTY          only white space, removed by the part before it
LEFT           joined with the part before it
LEFT_STRIPS    the same, and the white space after it is removed
RIGHT          joined with the part after it
"""


def _as_in_python(op: Op, name: str, parts: Parts, by_id: dict[int, AddedToken]) -> Parts:
    """Split as `PythonSplitter` does, from left to right: a part's state depends on that of the part before it."""
    begins, text = parts.begins(op), parts.text
    single, lstrip, rstrip = (_flagged(op, parts.ids, by_id, flag) for flag in ("single_word", "lstrip", "rstrip"))
    is_text, nothing = op.Less(parts.ids, 0), custom_match(op, text, f"[{PYTHONS_WHITE}]*")
    shortened = op.Or(is_text, custom_match(op, text, f"(?s)[{PYTHONS_WHITE}].*"))  # if the part before it strips
    behind = op.And(single, _before(op, custom_match(op, text, "(?s).*[^ ]"), begins))
    ahead = op.And(single, _behind(op, custom_match(op, text, "(?s)[^ ].*"), begins))
    alone = op.Where(ahead, RIGHT, op.Where(rstrip, STRIPS, STAYS))
    beside = op.Where(behind, op.Where(rstrip, LEFT_STRIPS, LEFT), alone)
    rest, none = op.Where(nothing, EMPTY, STAYS), op.Mul(alone, 0)
    rows = {STAYS: beside, STRIPS: op.Where(shortened, rest, beside), EMPTY: alone, LEFT: alone}
    rows |= {LEFT_STRIPS: op.Where(shortened, rest, alone), RIGHT: none}
    state = _followed(op, name, [op.Where(begins, alone, rows[before]) for before in range(len(rows))])
    before = op.Where(begins, STAYS, op.Concat([STAYS], op.Slice(state, [0], [-1], [0]), axis=0))
    stripped = op.Or(op.Equal(before, STRIPS), op.Equal(before, LEFT_STRIPS))
    inside = op.Equal(before, RIGHT)
    joins = op.Or(op.Equal(state, LEFT), op.Equal(state, LEFT_STRIPS))
    strips = op.And(lstrip, op.Not(op.Or(inside, op.And(stripped, shortened))))
    strips = op.And(_behind(op, strips, begins), op.Not(joins))
    text = op.Where(stripped, replaced(op, text, f"{name}.rstrip", f"^[{PYTHONS_WHITE}]+", ""), text)
    text = op.Where(strips, replaced(op, text, f"{name}.lstrip", f"[{PYTHONS_WHITE}]+$", ""), text)
    found = _joined(op, Parts(text, parts.ids, parts.first), op.Not(op.Or(joins, inside)))
    ids = value_of(op, found.text, {token.content: id for id, token in by_id.items()}, -1)
    return Parts(found.text, ids, found.first)


def _followed(op: Op, name: str, rows: Sequence[ir.Value]) -> ir.Value:
    """The state of each part (W+1,). rows[s] (W+1,): its state if the part before it has state s."""

    def body(op: Op, before: ir.Value, row: ir.Value) -> list[ir.Value]:
        with scope(op, "added", "Added"):
            now = op.Gather(row, before)
            return [now, op.Identity(now)]

    def value(key: str, shape: tuple[int, ...] = ()) -> ir.Value:
        return ir.Value(name=f"{name}.{key}", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(shape))

    graph = op.builder.subgraph(
        body, [value("before"), value("row", (len(rows),))], [value("now"), value("each")], name=name
    )
    steps = op.Concat(*(op.Unsqueeze(row, [1]) for row in rows), axis=1)
    return op.Scan(op.Squeeze([STAYS], [0]), steps, body=graph, num_scan_inputs=1, _outputs=2)[1]


def custom_match(op: Op, text: ir.Value, pattern: str) -> ir.Value:
    return op.RegexFullMatch(text, pattern=pattern)


def _flagged(op: Op, ids: ir.Value, by_id: dict[int, AddedToken], flag: str) -> ir.Value:
    flags = {id: int(getattr(token, flag)) for id, token in by_id.items()}
    return op.Greater(value_of(op, ids, flags, 0), 0)


def _before(op: Op, values: ir.Value, begins: ir.Value) -> ir.Value:
    """The value (W,) of the part before each part in its line; false for the first."""
    shifted = op.Concat(op.Constant(value=ir.tensor([False])), op.Slice(values, [0], [-1], [0]), axis=0)
    return op.And(shifted, op.Not(begins))


def _behind(op: Op, values: ir.Value, begins: ir.Value) -> ir.Value:
    """The value (W,) of the part after each part in its line; false for the last."""
    none = op.Constant(value=ir.tensor([False]))
    last = op.Concat(op.Slice(begins, [1], [END], [0]), op.Not(none), axis=0)
    return op.And(op.Concat(op.Slice(values, [1], [END], [0]), none, axis=0), op.Not(last))


@cache
def word_characters() -> str:
    r"""The characters that `tokenizers` takes for parts of a word (Rust's \w), as members of an RE2 class.

    They are found by encoding each character. Planes 4 to 13 of Unicode are empty, 15 and 16 private.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"\0": 0}, unk_token="\0"))
    backend.add_tokens([tokenizers.AddedToken("T", single_word=True, normalized=False)])
    codes = (*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xF0000))
    every = [chr(code) for code in codes if chr(code) not in " T"]
    encodings = (
        backend.encode("".join(f" T{letter}" for letter in every[i : i + 4096])) for i in range(0, len(every), 4096)
    )
    found = "".join(
        every[i * 4096 + (start + 1) // 3]
        for i, encoding in enumerate(encodings)
        for id, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
        if id == 1
    )
    return ranges(({*every} - {*found}) | {"T"})


class ByteLevelOps(BytePairOps):
    """Byte-level BPE as in BART: `<s> text </s>`.

    The ids are those of the imported tokenizer.json (`families/json_pieces.byte_level_json`), with an exception: the
    operator takes U+0085, and letters newer than Unicode 13, for punctuation, so that ids differ if such a character is
    beside a letter.
    """

    def _words(self, specification: dict[str, Any], known: Tokenizer) -> dict[str, Any]:
        self.before = known.ends[0]
        self.begins_with_space = specification["pre_tokenizer"]["add_prefix_space"]
        return specification["pre_tokenizer"]

    def cut(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        if not self.added:
            tokens, count = self._merged(op, self._spaced(op, text))
            return tokens, op.CumSum(count, 0, exclusive=1), count
        # The operator looks for added tokens, too, but loses part of a token at the end of a text.
        parts = parts_of(op, text, "typed", [token for token in self.added if not token.normalized])
        normal = [token for token in self.added if token.normalized]
        parts = parts.apart(op, parts_of(op, parts.without_tokens(op), "normal", normal)) if normal else parts
        is_token, letter = op.GreaterOrEqual(parts.ids, 0), strings(op, "text.letter", ["a"])
        tokens, counts = self._merged(op, op.Where(is_token, letter, self._spaced(op, parts.text)))
        starts = op.CumSum(counts, 0, exclusive=1)
        place, values = (op.Compress(x, is_token, axis=0) for x in (starts, parts.ids))
        tokens = op.ScatterElements(tokens, place, values, axis=0)
        starts = op.Gather(starts, parts.first)  # (B+1,)
        start = op.Slice(starts, [0], [-1], [0])
        return tokens, start, op.Sub(op.Slice(starts, [1], [END], [0]), start)

    def _spaced(self, op: Op, text: ir.Value) -> ir.Value:
        """Put a space before each text, which the operator doesn't do."""
        return replaced(op, text, "space", "(?s)^([^ ])", r" \1") if self.begins_with_space else text


def is_byte_level(tokenizer: str) -> bool:
    """Whether a tokenizer.json is byte-level BPE over GPT-2's words."""
    if side_texts(tokenizer) is not None:
        return False
    splitter = json.loads(tokenizer).get("pre_tokenizer") or {}
    return splitter.get("type") == "ByteLevel" and splitter.get("use_regex") is True
