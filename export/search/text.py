"""Text in and out of a search graph: the tokenizer as operators of ONNX, and four of onnxruntime-extensions.

Byte-level BPE as `core/tokenizer.py` has it, exactly: the same ids for every Unicode text, and the same text back.

Shapes: B lines, W words of all lines, N tokens of all lines, S longest line in tokens, n hypotheses, T their tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from export.nn.primitives import Op, table
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

from . import utf8
from .categories import LETTERS_AND_MARKS, NUMBERS
from .metadata import TEXT_DOMAIN

END = 1 << 60  # of a Slice
SPECIAL = len(SPECIAL_TOKENS)

# SPLIT_PATTERN in two steps: RE2 makes an automaton of 80,000 states from the repeated classes of a bare {1,32}.
WORDS = rf"([{NUMBERS}]|\p{{Z}}?[{LETTERS_AND_MARKS}]+|\p{{Z}}?[^{LETTERS_AND_MARKS}{NUMBERS}\p{{Z}}]+|\p{{Z}}{{1,32}})"
PIECES = r"(\p{Z}?\P{Z}{1,32}|\p{Z}{1,32})"
EXPECTED = r"\p{N}|\p{Z}?[\p{L}\p{M}]{1,32}|\p{Z}?[^\p{L}\p{M}\p{N}\p{Z}]{1,32}|\p{Z}{1,32}"
# What str.strip() takes away; a line of nothing else has an empty translation.
BLANK = "[\t-\r\x1c-\x1f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"


@dataclass(frozen=True)
class Lines:
    """A batch of texts as the encoder takes them."""

    ids: ir.Value
    """(B, S), eos after each, pad after that."""
    mask: ir.Value
    """(B, S) int64, 1 on tokens."""
    blank: ir.Value
    """(B,) boolean: nothing to translate."""


class TextOps:
    """Tokenizer and detokenizer from the text of a tokenizer.json."""

    domain = TEXT_DOMAIN

    def __init__(self, tokenizer: str, config: TransformerConfig):
        """`UserError` for a tokenizer that isn't of this project's making or doesn't fit the model."""
        given = Tokenizer(tokenizer)
        Translator(config, given, list)
        specification = json.loads(tokenizer)
        trained = json.loads(Tokenizer.train([], MIN_VOCAB_SIZE, mask=given.mask_id is not None).to_json())
        if SPLIT_PATTERN != EXPECTED or _behaviour(specification) != _behaviour(trained):
            raise UserError("tokenizer.json: text in a graph needs a tokenizer that `train` made; export without text")
        self.size, self.positions = config.vocab_size, config.max_positions
        self.vocabulary: dict[str, int] = specification["model"]["vocab"]
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
        config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<pad>"})
        padded = op.HfJsonTokenizer(pieces, tokenizer_config=config, tokenizer_vocab=self.merges, _domain=TEXT_DOMAIN)
        padded.type, padded.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["pieces", "piece_length"])
        is_token = op.Cast(padded, to=ir.DataType.BOOL)  # PAD is 0
        tokens = op.GatherND(padded, op.Transpose(op.NonZero(op.Slice(is_token, [0], [-1], [0])), perm=[1, 0]))  # (N,)
        before = op.CumSum(op.ReduceSum(op.Cast(is_token, to=ir.DataType.INT64), [1], keepdims=0), 0, exclusive=1)
        starts = op.Gather(before, first)  # (B+1,): tokens before each line
        start, end = op.Slice(starts, [0], [-1], [0]), op.Slice(starts, [1], [END], [0])  # (B,)
        count = op.Sub(end, start)
        # The list ends with eos as well, so that a line's column after its last token can read something.
        longest = op.Add(op.ReduceMax(count, keepdims=0), 1)
        rounded = op.Mul(op.Div(op.Add(longest, SOURCE_MULTIPLE - 1), SOURCE_MULTIPLE), SOURCE_MULTIPLE)
        width = op.Max(longest, op.Min(rounded, self.positions))  # as `Sources.padded`
        ids, column = rows_of(op, op.Concat(tokens, [EOS], axis=0), start, op.Add(count, 1), PAD, width)
        count = op.Unsqueeze(count, [1])
        ids = op.Where(op.Equal(column, count), EOS, ids)
        return Lines(ids, op.Cast(op.LessOrEqual(column, count), to=ir.DataType.INT64), blank)

    def decode(self, op: Op, sequences: ir.Value, blank: ir.Value) -> ir.Value:
        """
        ids (B, n, T) --> their bytes, one stream (N,), rows apart --> UTF-8 made valid --> rows, each joined (B, n)
        """
        shape = op.Shape(sequences, start=0, end=2)  # (2,): B, n
        without_blank = op.Where(op.Unsqueeze(blank, [1, 2]), PAD, sequences)
        separator = op.Expand(self.size, op.Concat(shape, [1], axis=0))
        tokens = op.Concat(without_blank, separator, axis=2)
        tokens = op.Reshape(tokens, op.Concat([-1], op.Shape(tokens, start=2), axis=0))  # (B*n, T+1)
        spelled = op.Gather(table(op, "text.bytes", lambda: self.spelling), tokens)  # (B*n, T+1, longest)
        is_byte = op.GreaterOrEqual(spelled, 0)
        count = op.ReduceSum(op.Cast(is_byte, to=ir.DataType.INT64), [1, 2], keepdims=0)  # (B*n,)
        stream = op.GatherND(spelled, op.Transpose(op.NonZero(is_byte), perm=[1, 0]))
        codes = utf8.well_formed(op, op.Cast(stream, to=ir.DataType.INT64))
        codes, _ = rows_of(op, codes, op.Sub(op.CumSum(count, 0), count), count, utf8.NOTHING)
        characters = op.Gather(strings(op, "text.characters", utf8.texts()), codes)
        joined = op.StringJoin(characters, strings(op, "text.nothing", [""]), [1], _domain=TEXT_DOMAIN)
        return op.Reshape(joined, shape)

    def _spelling(self) -> np.ndarray:
        """(size + 1, longest) int16: the bytes of each token, -1 after them, and a row for the separator."""
        bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}
        tokens = [(id, token) for token, id in self.vocabulary.items() if id >= SPECIAL]
        spelling = np.full((self.size + 1, max(len(token) for _, token in tokens)), -1, np.int16)
        for id, token in tokens:
            spelling[id, : len(token)] = [bytes_of[letter] for letter in token]
        spelling[-1, 0] = utf8.SEPARATOR
        return spelling


def byte_letters() -> str:
    """The letter by which a tokenizer.json of the ByteLevel kind spells each byte (Radford et al. 2019): itself where
    it is visible, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in visible else next(others)) for byte in range(256))


def _behaviour(specification: dict[str, Any]) -> list[Any]:
    """All settings that decide what a tokenizer does, without its vocabulary, <mask>'s place in it, and merges."""
    model = {name: value for name, value in specification["model"].items() if name not in ("vocab", "merges")}
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    added = specification.get("added_tokens") or []
    added = [{**entry, "id": "mask"} if entry.get("content") == MASK_TOKEN else entry for entry in added]
    return [model, added, *(specification.get(name) for name in names)]


def _split(op: Op, text: ir.Value, name: str, pattern: str) -> list[ir.Value]:
    """Pieces (W,), their ends, and the first piece of each text (B+1,)."""
    patterns = strings(op, f"text.{name}", [pattern]), strings(op, "text.keep", ["(?s).*"])
    outputs = op.StringRegexSplitWithOffsets(text, *patterns, _domain=TEXT_DOMAIN, _outputs=4)
    types = (ir.DataType.STRING, *[ir.DataType.INT64] * 3)
    for value, dtype in zip(outputs, types, strict=True):
        value.type, value.shape = ir.TensorType(dtype), ir.Shape([None])
    return outputs


def rows_of(
    op: Op, values: ir.Value, start: ir.Value, count: ir.Value, fill: int, width: ir.Value | None = None
) -> tuple[ir.Value, ir.Value]:
    """From a list (N,): row i is its `count[i]` values from `start[i]` on, then `fill`, up to `width`, default the
    longest. Also the columns' numbers."""
    column = op.Range(0, op.ReduceMax(count, keepdims=0) if width is None else width, 1)
    index = op.Min(op.Add(op.Unsqueeze(start, [1]), column), op.Sub(op.Size(values), 1))
    return op.Where(op.Less(column, op.Unsqueeze(count, [1])), op.Gather(values, index), fill), column


def strings(op: Op, name: str, values: list[str] | list[bytes]) -> ir.Value:
    """A constant vector of strings or bytes, by its name."""
    root = op.builder.root
    constant = root.graph.initializers.get(name)
    if constant is None:
        data = [value.encode() if isinstance(value, str) else value for value in values]
        proto = onnx.TensorProto(data_type=onnx.TensorProto.STRING, dims=[len(data)], string_data=data, name=name)
        constant = root.initializer(ir.from_proto(proto), name, qualify=False)
    return constant
