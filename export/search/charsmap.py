"""SentencePiece's table of replacements in a graph, text to text: at each place its longest string.

The table's trie is walked from all places at once, a byte a step, and the matches that follow each other from a text's
beginning are taken. `text/sentencepiece.py` says how the trie is stored.

SentencepieceTokenizer has the table too, but gives no text; with a vocabulary of bytes alone it gives a text's bytes.

Shapes: R texts, N bytes of all texts, U units of the trie, P bytes of the longest text.
"""

from __future__ import annotations

import base64

import numpy as np
import onnx_ir as ir

from export.nn.primitives import Op, table
from mlx_transformer.text.sentencepiece import (
    BPE,
    BYTE,
    BYTES,
    CONTROL,
    LONGEST_KEY,
    UNKNOWN,
    Piece,
    SentencePiece,
    replacements,
    sentencepiece_bytes,
)

from .steps import Carried, State, looped
from .text import CODE_TEXTS, END, custom, integer, strings

UNITS = {0: 256 << 10, 256: 255, 257: 3 << 10 | 1 << 8 | 1, 258: 1 << 31}
IDENTITY = b"".join(unit.to_bytes(4, "little") for unit in (4 * 512, *(UNITS.get(i, 0) for i in range(512)))) + b"\1\0"
"""A table that replaces U+0001 by itself: where there is none the operator writes a line to stderr."""
NO_BYTE = 256
"""Behind the last byte of a text."""
SPECIAL = 3
"""Pieces before the bytes."""
MOST_JUMPS = 40


class Table:
    """The trie as arrays, one entry a unit."""

    def __init__(self, charsmap: bytes) -> None:
        size = int.from_bytes(charsmap[:4], "little")
        units = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64)
        width = 1 << max(9, int(len(units) - 1).bit_length())  # any place XOR a byte is inside
        self.label, self.base = np.full(width, -1), np.zeros(width, np.int64)
        self.label[: len(units)] = units & 0x800000FF
        offset = (units >> 10) << ((units & 0x200) >> 6)
        self.base[: len(units)] = np.minimum(np.arange(len(units)) ^ offset, width - 1)
        self.first = int(self.base[0])
        values = sorted({*replacements(charsmap).values()})
        ends, number = charsmap[4 + size :], {value: i for i, value in enumerate(values)}
        self.value = np.full(width, -1)
        for place in np.flatnonzero(units & 0x100):
            start = int(units[self.base[place]] & 0x7FFFFFFF) if self.base[place] < len(units) else len(ends)
            end = ends.find(b"\0", start)
            text = ends[start : end if end >= 0 else None].decode("utf-8", "replace")
            self.value[place] = number.get(text, -1)
        self.texts = values


def text_bytes(op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Text (R,) to the bytes of all texts (N,), and where each begins and the last one ends (R+1,)."""
    first = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
    pieces = (*first, *(Piece(byte, 0.0, BYTE) for byte in BYTES))
    options = dict(model_type=BPE, byte_fallback=True, dummy_prefix=False, remove_extra_whitespace=False)
    model = SentencePiece(pieces=pieces, charsmap=IDENTITY, **options)  # type: ignore[arg-type]
    data = base64.b64encode(sentencepiece_bytes(model, escaped=False)).decode()
    bytes, rows = pieces_of(op, text, data)
    return op.Sub(bytes, SPECIAL), rows


def pieces_of(op: Op, text: ir.Value, model: str, bos: bool = False, eos: bool = False) -> tuple[ir.Value, ir.Value]:
    """Text (B,) to the tokens of all lines (N,) by a SentencePiece model in base64, and where each line begins and the
    last one ends (B+1,). bos: of id -1, a place for another."""
    none = (table(op, f"text.{t.__name__}", lambda t=t: np.zeros(1, t)) for t in (np.int64, np.float32))  # sampling
    flags = bos, eos, False, False  # not reversed, not numbered as in fairseq
    values = (table(op, f"text.{flag}", lambda flag=flag: np.array([flag])) for flag in flags)
    tokens, rows = custom(op, "SentencepieceTokenizer", text, *none, *values, model=model, kinds="iI")
    return integer(op, tokens), rows


def normalized(op: Op, text: ir.Value, charsmap: bytes) -> ir.Value:
    """Text (R,) to text (R,)."""
    trie = Table(charsmap)
    bytes, rows = text_bytes(op, text)
    # An extra byte, of no text: the operators take no empty list.
    bytes, count = op.Concat(bytes, [NO_BYTE], axis=0), op.Add(op.Size(bytes), 1)
    values, lengths = _matches(op, trie, bytes, rows)
    reached = _reached(op, bytes, op.Where(op.GreaterOrEqual(values, 0), lengths, 0))
    owner = op.Gather(op.Squeeze(op.NonZero(reached), [0]), op.Sub(op.CumSum(integer(op, reached), 0), 1))
    own, at = op.Gather(values, owner), op.Range(0, count, 1)
    nothing = len(CODE_TEXTS) - 1
    made = op.Where(op.Equal(at, owner), op.Add(own, len(CODE_TEXTS)), nothing)
    codes = op.Where(op.Less(own, 0), op.Where(op.Equal(bytes, NO_BYTE), nothing, bytes), made)  # (N,)
    start = op.Slice(rows, [0], [-1], [0])
    length = op.Sub(op.Slice(rows, [1], [END], [0]), start)
    column = op.Range(0, op.Max(op.ReduceMax(length, keepdims=0), 1), 1)
    place = op.Where(op.Less(column, op.Unsqueeze(length, [1])), op.Add(op.Unsqueeze(start, [1]), column), -1)
    letters = op.Gather(strings(op, "text.replacements", [*CODE_TEXTS, *trie.texts]), op.Gather(codes, place))  # (R, P)
    return custom(op, "StringJoin", letters, strings(op, "text.nothing", [""]), [1], kinds="S")


def _matches(op: Op, trie: Table, bytes: ir.Value, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The replacement of the longest string from each byte (N,), -1 without one, and the string's bytes."""
    none, at = op.Mul(bytes, 0), op.Range(0, op.Size(bytes), 1)
    marks = op.ScatterElements(none, rows, op.Add(op.Mul(rows, 0), 1), axis=0, reduction="add")
    ends = op.Gather(op.Concat(rows, op.Reshape(op.Size(bytes), [1]), axis=0), op.CumSum(marks, 0))  # (N,)
    arrays = [
        table(op, f"text.trie.{name}", lambda x=x: x)
        for name, x in {"label": trie.label, "base": trie.base, "value": trie.value}.items()
    ]

    def body(op: Op, values: State) -> tuple[ir.Value, State, list[ir.Value]]:
        step = values["iteration"]
        ahead = op.Add(at, step)
        byte = op.Gather(bytes, op.Min(ahead, op.Sub(op.Size(bytes), 1)))
        place = op.BitwiseXor(values["place"], byte)
        label, base, value = (op.Gather(array, op.Min(place, len(trie.label) - 1)) for array in arrays)
        alive = op.And(op.And(values["alive"], op.Less(ahead, ends)), op.Equal(label, byte))
        ends_here = op.And(alive, op.GreaterOrEqual(value, 0))
        after = {
            "place": base,
            "alive": alive,
            "value": op.Where(ends_here, value, values["value"]),
            "length": op.Where(ends_here, op.Add(step, 1), values["length"]),
        }
        return op.Greater(op.ReduceMax(integer(op, alive), keepdims=0), 0), after, []

    starts = {"place": op.Add(none, trie.first), "value": op.Sub(none, 1), "length": none}
    carried = {name: Carried(start, ir.DataType.INT64, ("bytes",)) for name, start in starts.items()}
    carried["alive"] = Carried(op.Equal(none, 0), ir.DataType.BOOL, ("bytes",))
    result, _ = looped(op, "replacements", op.Constant(value_int=LONGEST_KEY), carried, body)
    return result["value"], result["length"]


def _reached(op: Op, bytes: ir.Value, lengths: ir.Value) -> ir.Value:
    """Whether a character begins at a byte (N,) that no replaced string before it has taken: found by doubling. A text
    begins where the one before it ends."""
    letters = np.ones(NO_BYTE + 1, np.int64)
    letters[0xC0:0xE0], letters[0xE0:0xF0], letters[0xF0:0xF8] = 2, 3, 4
    one = op.Gather(table(op, "text.letters", lambda: letters), bytes)
    count = op.Size(bytes)
    after = op.Add(op.Range(0, count, 1), op.Where(op.Greater(lengths, 0), lengths, one))
    jump = op.Concat(op.Min(after, count), op.Reshape(count, [1]), axis=0)
    begun = op.Equal(op.Range(0, op.Add(count, 1), 1), 0)

    def body(op: Op, values: State) -> tuple[ir.Value, State, list[ir.Value]]:
        jump, reached = values["jump"], values["reached"]
        reached = op.ScatterElements(reached, jump, reached, axis=0, reduction="max")
        more = op.Less(op.ReduceMin(jump, keepdims=0), count)
        return more, {"jump": op.Gather(jump, jump), "reached": reached}, []

    carried = {
        "jump": Carried(jump, ir.DataType.INT64, ("places",)),
        "reached": Carried(integer(op, begun), ir.DataType.INT64, ("places",)),
    }
    result, _ = looped(op, "reached", op.Constant(value_int=MOST_JUMPS), carried, body)
    return op.Cast(op.Slice(result["reached"], [0], [-1], [0]), to=ir.DataType.BOOL)
