"""Text in and out of a search graph: the tokenizer as operators of ONNX, and four of onnxruntime-extensions.
Vocabularies of SentencePiece: `pieces.py`.

Byte-level BPE as `core/tokenizer.py` has it, exactly: the same ids for every Unicode text, and the same text back.

Shapes: B lines, W words of all lines, N tokens of all lines or bytes of a stream, S longest line in tokens,
n hypotheses, T their tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from export.nn.primitives import Op, size, table
from export.targets.portable.runtime import SOURCE_MULTIPLE
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer import (
    EOS,
    MASK_TOKEN,
    MIN_VOCAB_SIZE,
    PAD,
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    Tokenizer,
)
from mlx_transformer.generation.translate import Translator
from mlx_transformer.system.errors import UserError

from .metadata import TEXT_DOMAIN

END = 1 << 60  # of a Slice
SPECIAL = len(SPECIAL_TOKENS)
SEPARATOR = 256
"""Not a byte: stands between two texts."""
REPLACEMENT, NOTHING = 257, 258
"""Codes of U+FFFD and of a byte that falls away."""


def _ranges(text: str) -> str:
    """ "870-887 8b5" -> the same in a class of RE2."""
    parts = (part.partition("-") for part in text.split())
    return "".join(rf"\x{{{first}}}" + (rf"-\x{{{last}}}" if last else "") for first, _, last in parts)


# Classes of regular expressions, without their brackets, for RE2, which knows Unicode 13; `tokenizers` knows 16. A test
# compares both on every code point.
LETTERS_AND_MARKS = r"\p{L}\p{M}" + _ranges(
    """
    870-887 889-88e 897-89f 8b5 8c8-8d2 c3c c5d cdd cf3 ece 170d 1715 171f 180f 1ac1-1ace 1b4c 1c89-1c8a 1dfa
    2c2f 2c5f 9ffd-9fff a7c0-a7c1 a7cb-a7cd a7d0-a7d1 a7d3 a7d5-a7dc a7f2-a7f4 10570-1057a 1057c-1058a
    1058c-10592 10594-10595 10597-105a1 105a3-105b1 105b3-105b9 105bb-105bc 105c0-105f3 10780-10785 10787-107b0
    107b2-107ba 10d4a-10d65 10d69-10d6d 10d6f-10d85 10ec2-10ec4 10efc-10eff 10f70-10f85 11070-11075 110c2
    1123f-11241 11380-11389 1138b 1138e 11390-113b5 113b7-113c0 113c2 113c5 113c7-113ca 113cc-113d3 113e1-113e2
    11740-11746 11ab0-11abf 11bc0-11be0 11f00-11f10 11f12-11f3a 11f3e-11f42 11f5a 12f90-12ff0 1342f 13440-13455
    13460-143fa 16100-1612f 16a70-16abe 16d40-16d6c 18cff 1aff0-1aff3 1aff5-1affb 1affd-1affe 1b11f-1b122 1b132
    1b155 1cf00-1cf2d 1cf30-1cf46 1df00-1df1e 1df25-1df2a 1e030-1e06d 1e08f 1e290-1e2ae 1e4d0-1e4ef 1e5d0-1e5f0
    1e7e0-1e7e6 1e7e8-1e7eb 1e7ed-1e7ee 1e7f0-1e7fe 2a6de-2a6df 2b735-2b739 2ebf0-2ee5d 31350-323af
    """
)
NUMBERS = r"\p{N}" + _ranges(
    """
    10d40-10d49 116d0-116e3 11bf0-11bf9 11f50-11f59 16130-16139 16ac0-16ac9 16d70-16d79 1ccf0-1ccf9 1d2c0-1d2d3
    1e4f0-1e4f9 1e5f1-1e5fa
    """
)

# SPLIT_PATTERN in two steps: RE2 makes an automaton of 80,000 states from the repeated classes of a bare {1,32}.
WORDS = rf"([{NUMBERS}]|\p{{Z}}?[{LETTERS_AND_MARKS}]+|\p{{Z}}?[^{LETTERS_AND_MARKS}{NUMBERS}\p{{Z}}]+|\p{{Z}}{{1,32}})"
PIECES = r"(\p{Z}?\P{Z}{1,32}|\p{Z}{1,32})"
EXPECTED = r"\p{N}|\p{Z}?[\p{L}\p{M}]{1,32}|\p{Z}?[^\p{L}\p{M}\p{N}\p{Z}]{1,32}|\p{Z}{1,32}"
# The characters that str.strip() takes away; a line of nothing else has an empty translation.
BLANK = "[\t-\r\x1c-\x1f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"
FAST = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<pad>"})
"""The parts of a tokenizer.json that the operator needs."""


@dataclass(frozen=True)
class Lines:
    """A batch of texts as the encoder takes them."""

    ids: ir.Value
    """(B, S), eos after each, pad after that."""
    mask: ir.Value
    """(B, S) int64, 1 on tokens."""
    blank: ir.Value
    """(B,) boolean: nothing to translate."""

    @classmethod
    def of(
        cls, op: Op, tokens: ir.Value, start: ir.Value, count: ir.Value, pad: int, positions: int, blank: ir.Value
    ) -> Lines:
        """Cut a list (N,) into lines: line i has the `count[i]` tokens from `start[i]` on (B,)."""
        longest = op.ReduceMax(count, keepdims=0)
        ids, column = rows_of(op, tokens, start, count, pad, padded_width(op, longest, positions))
        mask = op.Cast(op.Less(column, op.Unsqueeze(count, [1])), to=ir.DataType.INT64)
        return cls(ids, mask, blank)

    def between(self, op: Op, prefix: ir.Value, suffix: ir.Value) -> Lines:
        """Return the same lines, each behind ids (P,) and before others (Q,)."""
        shape = op.Concat(op.Shape(self.blank), op.Shape(prefix), axis=0)  # (2,): B, P
        ids = op.Concat(op.Expand(prefix, shape), self.ids, axis=1)
        mask = op.Concat(op.Expand(1, shape), self.mask, axis=1)
        more = op.Concat(op.Shape(self.blank), op.Shape(suffix), axis=0)  # (2,): B, Q
        count = op.ReduceSum(mask, [1])  # (B, 1)
        ids, mask = (op.Concat(x, op.Expand(0, more), axis=1) for x in (ids, mask))
        column = op.Range(0, size(op, suffix, 0), 1)  # (Q,)
        places = op.Add(count, column)  # (B, Q)
        ids = op.ScatterElements(ids, places, op.Expand(suffix, more), axis=1)
        return Lines(ids, op.ScatterElements(mask, places, op.Expand(1, more), axis=1), self.blank)


class TextOps:
    """Tokenizer and detokenizer from the text of a tokenizer.json."""

    def __init__(self, tokenizer: str, config: TransformerConfig):
        """`UserError` for a tokenizer that isn't of this project's making or doesn't fit the model."""
        plain = Tokenizer(tokenizer)
        Translator(config, plain, list)
        specification = json.loads(tokenizer)
        trained = json.loads(Tokenizer.train([], MIN_VOCAB_SIZE, mask=plain.mask_id is not None).to_json())
        if SPLIT_PATTERN != EXPECTED or _behaviour(specification) != _behaviour(trained):
            raise UserError(
                "tokenizer.json: text in a graph needs a tokenizer that `train` or `import` made; export without text:"
                " that file holds the tokenizer too, and translate and SearchModel take text"
            )
        self.size, self.positions = config.vocab_size, config.max_positions
        self.vocabulary: dict[str, int] = specification["model"]["vocab"]
        self.special, self.pad = range(SPECIAL), PAD
        self.spelling = self._spelling()
        # The pieces come in split, so each is one whole here; without an expression the operator takes GPT-2's. No
        # token is looked for before the merges: the text "</s>" is four characters.
        unsplit = {"type": "Split", "pattern": {"Regex": "[\\s\\S]+"}, "behavior": "Isolated", "invert": False}
        split = {"type": "Sequence", "pretokenizers": [unsplit, specification["pre_tokenizer"]["pretokenizers"][1]]}
        changed = {"pre_tokenizer": split, "post_processor": None, "added_tokens": []}
        self.merges = json.dumps({**specification, **changed})

    def encode(self, op: Op, text: ir.Value) -> Lines:
        """
        text (B,) --> words --> pieces (W,) --> BPE (W, longest) --> tokens (N,) --> ids (B, S)
                        \\--> rows (B+1,): first piece of each line ------------------^
        """
        blank = op.RegexFullMatch(text, pattern=BLANK)
        words, _, _, lines = _split(op, text, "words", WORDS)
        # One more word, taken out again below: the operators don't take an empty list.
        pieces, _, _, rows = _split(op, op.Concat(words, strings(op, "text.none", ["."]), axis=0), "pieces", PIECES)
        first = op.Gather(rows, lines)  # (B+1,)
        padded = op.HfJsonTokenizer(pieces, tokenizer_config=FAST, tokenizer_vocab=self.merges, _domain=TEXT_DOMAIN)
        padded.type, padded.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["pieces", "piece_length"])
        is_token = op.Cast(padded, to=ir.DataType.BOOL)  # PAD is 0
        tokens = op.GatherND(padded, op.Transpose(op.NonZero(op.Slice(is_token, [0], [-1], [0])), perm=[1, 0]))  # (N,)
        before = op.CumSum(op.ReduceSum(op.Cast(is_token, to=ir.DataType.INT64), [1], keepdims=0), 0, exclusive=1)
        starts = op.Gather(before, first)  # (B+1,): tokens before each line
        start, end = op.Slice(starts, [0], [-1], [0]), op.Slice(starts, [1], [END], [0])  # (B,)
        count = op.Sub(end, start)
        # The list ends with eos as well, so that a line's column after its last token can read something.
        longest = op.Add(op.ReduceMax(count, keepdims=0), 1)
        width = padded_width(op, longest, self.positions)
        ids, column = rows_of(op, op.Concat(tokens, [EOS], axis=0), start, op.Add(count, 1), PAD, width)
        count = op.Unsqueeze(count, [1])
        ids = op.Where(op.Equal(column, count), EOS, ids)
        return Lines(ids, op.Cast(op.LessOrEqual(column, count), to=ir.DataType.INT64), blank)

    def decode(self, op: Op, sequences: ir.Value, blank: ir.Value) -> ir.Value:
        """
        ids (B, n, T) --> their bytes, one stream (N,), rows apart --> UTF-8 made valid --> rows, each joined (B, n)
        """
        shape = op.Shape(sequences, start=0, end=2)  # (2,): B, n
        without_blank = op.Where(op.Unsqueeze(blank, [1, 2]), self.pad, sequences)
        separator = op.Expand(self.size, op.Concat(shape, [1], axis=0))
        tokens = op.Concat(without_blank, separator, axis=2)
        tokens = op.Reshape(tokens, op.Concat([-1], op.Shape(tokens, start=2), axis=0))  # (B*n, T+1)
        spelled = op.Gather(table(op, "text.bytes", lambda: self.spelling), tokens)  # (B*n, T+1, longest)
        is_byte = op.GreaterOrEqual(spelled, 0)
        count = op.ReduceSum(op.Cast(is_byte, to=ir.DataType.INT64), [1, 2], keepdims=0)  # (B*n,)
        stream = op.GatherND(spelled, op.Transpose(op.NonZero(is_byte), perm=[1, 0]))
        codes = well_formed(op, op.Cast(stream, to=ir.DataType.INT64))
        codes, _ = rows_of(op, codes, op.Sub(op.CumSum(count, 0), count), count, NOTHING)
        characters = op.Gather(strings(op, "text.characters", code_texts()), codes)
        joined = op.StringJoin(characters, strings(op, "text.nothing", [""]), [1], _domain=TEXT_DOMAIN)
        return op.Reshape(joined, shape)

    def _spelling(self) -> np.ndarray:
        """Return (size + 1, longest) int16: the bytes of each token, -1 after them, and a row for the separator."""
        bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}
        tokens = [(id, token) for token, id in self.vocabulary.items() if id not in self.special]
        spelling = np.full((self.size + 1, max(len(token) for _, token in tokens)), -1, np.int16)
        for id, token in tokens:
            spelling[id, : len(token)] = [bytes_of[letter] for letter in token]
        spelling[-1, 0] = SEPARATOR
        return spelling


def padded_width(op: Op, longest: ir.Value, positions: int) -> ir.Value:
    """Return the width that `Sources.padded` has."""
    rounded = op.Mul(op.Div(op.Add(longest, SOURCE_MULTIPLE - 1), SOURCE_MULTIPLE), SOURCE_MULTIPLE)
    return op.Max(longest, op.Min(rounded, positions))


def well_formed(op: Op, stream: ir.Value) -> ir.Value:
    """Return (N,) int64 in 0..SEPARATOR -> codes (N,): the same where well-formed, REPLACEMENT or NOTHING elsewhere.

    Bytes that needn't be UTF-8 are made valid: each ill-formed part becomes one U+FFFD, as Rust and the Unicode
    Standard (chapter 3.9, "U+FFFD Substitution of Maximal Subparts") have it.
    """
    names = ("utf8.needs", "utf8.low", "utf8.high")
    tables = (table(op, name, lambda row=row: lead_bytes()[row]) for row, name in enumerate(names))
    needs, low, high = (op.Gather(values, stream) for values in tables)
    following = op.Concat(stream, [SEPARATOR, SEPARATOR, SEPARATOR], axis=0)
    first, second, third = (op.Slice(following, [i], [i - 3 if i < 3 else 1 << 60], [0]) for i in (1, 2, 3))
    # How many bytes continue what this one begins: 0 up to what it needs.
    one = op.And(op.And(op.GreaterOrEqual(first, low), op.LessOrEqual(first, high)), op.GreaterOrEqual(needs, 1))
    two = op.And(op.And(one, _continues(op, second)), op.GreaterOrEqual(needs, 2))
    three = op.And(op.And(two, _continues(op, third)), op.GreaterOrEqual(needs, 3))
    run = op.Add(op.Add(integer(op, one), integer(op, two)), integer(op, three))
    complete = op.Equal(run, needs)
    # The effect of an earlier lead on this byte: 1 kept, 2 falls away; no byte belongs to two of them.
    fate = op.Where(complete, 1, 2)
    covered = None
    for distance, reached in enumerate((one, two, three), start=1):
        reach = op.Where(reached, fate, 0)
        shifted = op.Slice(op.Concat([0] * distance, reach, axis=0), [0], [-distance], [0])
        covered = shifted if covered is None else op.Add(covered, shifted)
    code = op.Where(complete, stream, REPLACEMENT)
    return op.Where(op.Equal(covered, 1), stream, op.Where(op.Equal(covered, 2), NOTHING, code))


def lead_bytes() -> np.ndarray:
    """Return (3, 257): bytes that must follow each byte (-1: it can't begin a character), and the range of the next
    one."""
    table = np.zeros((3, SEPARATOR + 1), np.int64)
    needs, low, high = table
    needs[0x80:0xC2] = needs[0xF5:0x100] = -1
    needs[0xC2:0xE0], needs[0xE0:0xF0], needs[0xF0:0xF5] = 1, 2, 3
    low[:], high[:] = 0x80, 0xBF
    low[0xE0], high[0xED], low[0xF0], high[0xF4] = 0xA0, 0x9F, 0x90, 0x8F
    return table


def code_texts() -> list[bytes]:
    """Return the bytes that each code stands for."""
    return [bytes([byte]) for byte in range(256)] + [b"", "\ufffd".encode(), b""]


def _continues(op: Op, byte: ir.Value) -> ir.Value:
    return op.And(op.GreaterOrEqual(byte, 0x80), op.LessOrEqual(byte, 0xBF))


def integer(op: Op, x: ir.Value) -> ir.Value:
    return op.Cast(x, to=ir.DataType.INT64)


def byte_letters() -> str:
    """Return the letter by which a tokenizer.json of the ByteLevel kind spells each byte (Radford et al. 2019): itself
    where it is visible, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in visible else next(others)) for byte in range(256))


def _behaviour(specification: dict[str, Any]) -> list[Any]:
    """Return all settings that decide what a tokenizer does, without its vocabulary, <mask>'s place in it, and
    merges."""
    model = {name: value for name, value in specification["model"].items() if name not in ("vocab", "merges")}
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    added = specification.get("added_tokens") or []
    added = [{**entry, "id": "mask"} if entry.get("content") == MASK_TOKEN else entry for entry in added]
    return [model, added, *(specification.get(name) for name in names)]


def _split(op: Op, text: ir.Value, name: str, pattern: str) -> list[ir.Value]:
    """Return pieces (W,), their ends, and the first piece of each text (B+1,)."""
    patterns = strings(op, f"text.{name}", [pattern]), strings(op, "text.keep", ["(?s).*"])
    outputs = op.StringRegexSplitWithOffsets(text, *patterns, _domain=TEXT_DOMAIN, _outputs=4)
    types = (ir.DataType.STRING, *[ir.DataType.INT64] * 3)
    for value, dtype in zip(outputs, types, strict=True):
        value.type, value.shape = ir.TensorType(dtype), ir.Shape([None])
    return outputs


def rows_of(
    op: Op, values: ir.Value, start: ir.Value, count: ir.Value, fill: int, width: ir.Value | None = None
) -> tuple[ir.Value, ir.Value]:
    """Cut rows out of a list (N,): row i is its `count[i]` values from `start[i]` on, then `fill`, up to `width`,
    default the longest. Also the columns' numbers."""
    column = op.Range(0, op.ReduceMax(count, keepdims=0) if width is None else width, 1)
    index = op.Min(op.Add(op.Unsqueeze(start, [1]), column), op.Sub(op.Size(values), 1))
    return op.Where(op.Less(column, op.Unsqueeze(count, [1])), op.Gather(values, index), fill), column


def strings(op: Op, name: str, values: list[str] | list[bytes]) -> ir.Value:
    """Return a constant vector of strings or bytes, by its name."""
    root = op.builder.root
    constant = root.graph.initializers.get(name)
    if constant is None:
        data = [value.encode() if isinstance(value, str) else value for value in values]
        proto = onnx.TensorProto(data_type=onnx.TensorProto.STRING, dims=[len(data)], string_data=data, name=name)
        constant = root.initializer(ir.from_proto(proto), name, qualify=False)
    return constant


def replaced(op: Op, text: ir.Value, name: str, pattern: str, by: str) -> ir.Value:
    """Return text (B,) with what an expression of RE2 finds replaced."""
    inputs = strings(op, f"text.{name}", [pattern]), strings(op, f"text.{name}.by", [by])
    result = op.StringRegexReplace(text, *inputs, _domain=TEXT_DOMAIN)
    result.type, result.shape = ir.TensorType(ir.DataType.STRING), text.shape
    return result
