"""Byte-level BPE as in BART in a graph: words are cut as GPT-2 cuts them."""

from __future__ import annotations

import json
from typing import Any

import onnx_ir as ir

from export.nn.primitives import Op
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.text.tokenizer import Tokenizer

from .added import parts_of
from .text import END, BytePairOps, replaced, strings


class ByteLevelOps(BytePairOps):
    """Byte-level BPE as in BART: `<s> text </s>`.

    The ids are those of `families/byte_level.py`, with one exception: the operator takes U+0085, and letters newer than
    Unicode 13, for punctuation, so ids differ if such a character stands beside a letter.
    """

    def _words(self, specification: dict[str, Any], known: Tokenizer) -> dict[str, Any]:
        self.before = [specification["model"]["vocab"]["<s>"]]
        self.begins_with_space = specification["pre_tokenizer"]["add_prefix_space"]
        return specification["pre_tokenizer"]

    def cut(self, op: Op, text: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        if not self.added:
            tokens, count = self._merged(op, self._spaced(op, text))
            return tokens, op.CumSum(count, 0, exclusive=1), count
        # The operator looks for added tokens too, but loses a part of one at the end of a text.
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
        """Texts with the space before them that the operator doesn't add."""
        return replaced(op, text, "space", "(?s)^([^ ])", r" \1") if self.begins_with_space else text


def is_byte_level(tokenizer: str) -> bool:
    """Whether this tokenizer.json is byte-level BPE over GPT-2's words."""
    if side_texts(tokenizer) is not None:
        return False
    splitter = json.loads(tokenizer).get("pre_tokenizer") or {}
    return splitter.get("type") == "ByteLevel" and splitter.get("use_regex") is True
