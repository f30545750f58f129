"""Tokens that a model's maker added, in a graph: a text is taken apart at them as `text/added_tokens.py` does it.

Shapes: B lines, W parts of all lines, S of them that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import onnx_ir as ir
import tokenizers

from export.nn.primitives import Op
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.added_tokens import AddedToken

from .text import END, WHITE, custom, integer, one_of, ranges, replaced, split, strings, value_of

PYTHONS_WHITE = rf"{WHITE}\x{{1c}}-\x{{1f}}"
"""What Python's str.strip() removes, as members of a class of RE2."""


class Parts(NamedTuple):
    """Lines taken apart. One part more, which is of no line, stands at the end: operators take no empty list."""

    text: ir.Value
    """(W+1,)"""
    ids: ir.Value
    """(W+1,) of added tokens, -1 of text between them."""
    first: ir.Value
    """(B+1,): where each line begins, and where the last one ends."""

    def without_tokens(self, op: Op, text: ir.Value | None = None) -> ir.Value:
        """The texts, or what became of them, with a point in the place of each token."""
        point = strings(op, "text.one", ["."])
        return op.Where(op.GreaterOrEqual(self.ids, 0), point, self.text if text is None else text)

    def apart(self, op: Op, inner: Parts) -> Parts:
        """The same where `without_tokens` was taken apart again."""
        place = op.Slice(inner.first, [0], [-1], [0])
        is_token = op.GreaterOrEqual(self.ids, 0)
        place, own = (op.Compress(x, is_token, axis=0) for x in (place, self.ids))
        return Parts(inner.text, op.ScatterElements(inner.ids, place, own, axis=0), op.Gather(inner.first, self.first))

    def begins(self, op: Op) -> ir.Value:
        """Whether a line begins with a part (W+1,)."""
        none = op.Mul(op.Concat(self.ids, [0], axis=0), 0)
        marked = op.ScatterElements(none, self.first, op.Add(op.Mul(self.first, 0), 1), axis=0)
        return op.Cast(op.Slice(marked, [0], [-1], [0]), to=ir.DataType.BOOL)


def parts_of(op: Op, text: ir.Value, name: str, tokens: Sequence[AddedToken], python: bool = False) -> Parts:
    """Take text (B,) apart. python: as the tokenizers of transformers that are written in Python do."""
    if not tokens:
        one = strings(op, "text.one", ["."])
        first = op.Range(0, op.Add(op.Squeeze(op.Shape(text), [0]), 1), 1)
        text = op.Concat(text, one, axis=0)
        return Parts(text, op.Expand(-1, op.Shape(text)), first)
    text, first = split(op, text, name, one_of(token.content for token in tokens))
    text = op.Concat(text, strings(op, "text.one", ["."]), axis=0)
    by_id = {token.id: token for token in tokens}
    parts = Parts(text, value_of(op, text, {token.content: token.id for token in tokens}, -1), first)
    if any(token.single_word for token in tokens):
        if python:
            raise UserError(
                "tokenizer.json: its added tokens that are one as a word by itself only depend on one another, which no"
                " operator follows; export without text: that file holds the tokenizer too, and SearchModel takes text"
            )
        parts = _words_alone(op, name, parts, by_id)
    white = PYTHONS_WHITE if python else WHITE
    begins, is_text, text = parts.begins(op), op.Less(parts.ids, 0), parts.text
    for flag, pattern in {"lstrip": f"[{white}]+$", "rstrip": f"^[{white}]+"}.items():
        if not any(getattr(token, flag) for token in tokens):
            continue
        takes = _flagged(op, parts.ids, by_id, flag)
        beside = _behind(op, takes, begins) if flag == "lstrip" else _before(op, takes, begins)
        text = op.Where(op.And(beside, is_text), replaced(op, text, f"{name}.{flag}", pattern, ""), text)
    return Parts(text, parts.ids, parts.first)


def _words_alone(op: Op, name: str, parts: Parts, by_id: dict[int, AddedToken]) -> Parts:
    """Tokens with a word on either side become text, one with what stands there."""
    begins, word = parts.begins(op), word_characters()
    ends_word = custom_match(op, parts.text, f"(?s).*[{word}]")
    starts_word = custom_match(op, parts.text, f"(?s)[{word}].*")
    within = op.Or(_before(op, ends_word, begins), _behind(op, starts_word, begins))
    dropped = op.And(_flagged(op, parts.ids, by_id, "single_word"), within)
    ids = op.Where(dropped, -1, parts.ids)
    is_text = op.Less(ids, 0)
    opens = op.Or(op.Not(is_text), op.Or(begins, op.Not(_before(op, is_text, begins))))
    last = op.Sub(op.Size(ids), 1)
    opens = op.Or(opens, op.Equal(op.Range(0, op.Size(ids), 1), last))  # what is of no line
    index = op.Sub(op.CumSum(integer(op, opens), 0), 1)  # (W+1,): which of those that stay
    start = op.Squeeze(op.NonZero(opens), [0])  # (S,)
    length = op.Sub(op.Concat(op.Slice(start, [1], [END], [0]), op.Reshape(op.Size(ids), [1]), axis=0), start)
    column = op.Range(0, op.ReduceMax(length, keepdims=0), 1)
    place = op.Add(op.Unsqueeze(start, [1]), column)
    place = op.Where(op.Less(column, op.Unsqueeze(length, [1])), place, -1)
    letters = op.Gather(op.Concat(parts.text, strings(op, "text.nothing", [""]), axis=0), place)
    joined = custom(op, "StringJoin", letters, strings(op, "text.nothing", [""]), [1], kinds="S")
    return Parts(joined, op.Gather(ids, start), op.Gather(index, parts.first))


def custom_match(op: Op, text: ir.Value, pattern: str) -> ir.Value:
    return op.RegexFullMatch(text, pattern=pattern)


def _flagged(op: Op, ids: ir.Value, by_id: dict[int, AddedToken], flag: str) -> ir.Value:
    flags = {id: int(getattr(token, flag)) for id, token in by_id.items()}
    return op.Greater(value_of(op, ids, flags, 0), 0)


def _before(op: Op, values: ir.Value, begins: ir.Value) -> ir.Value:
    """The value (W,) of the part before each in its line; false of the first."""
    shifted = op.Concat(op.Constant(value=ir.tensor([False])), op.Slice(values, [0], [-1], [0]), axis=0)
    return op.And(shifted, op.Not(begins))


def _behind(op: Op, values: ir.Value, begins: ir.Value) -> ir.Value:
    """The value (W,) of the part behind each in its line; false of the last."""
    none = op.Constant(value=ir.tensor([False]))
    last = op.Concat(op.Slice(begins, [1], [END], [0]), op.Not(none), axis=0)
    return op.And(op.Concat(op.Slice(values, [1], [END], [0]), none, axis=0), op.Not(last))


@cache
def word_characters() -> str:
    r"""The characters that `tokenizers` takes for parts of a word (Rust's \w), as members of a class of RE2; it is
    asked about each."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"\0": 0}, unk_token="\0"))
    backend.add_tokens([tokenizers.AddedToken("T", single_word=True, normalized=False)])
    every = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x110000)) if chr(code) not in " T"]
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
