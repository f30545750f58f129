"""Text in and out of a search graph whose vocabulary is byte-level BPE as published models have it, BART's: words are
GPT-2's, which the operator of onnxruntime-extensions knows.

The ids are those of `families/byte_level.py`, but where a letter that Unicode 13 didn't have yet, or U+0085, stands
beside another: the operator takes it for a sign.

Shapes: B lines, N tokens of all lines, L the longest line.
"""

from __future__ import annotations

import json

import onnx_ir as ir

from export.nn.primitives import Op
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.generation.translate import Translator

from .metadata import TEXT_DOMAIN
from .text import BLANK, FAST, Lines, TextOps, replaced


class ByteLevelOps(TextOps):
    """Tokenizer and detokenizer of `<s> text </s>`."""

    def __init__(self, tokenizer: str, config: TransformerConfig):
        trained, specification = Tokenizer(tokenizer), json.loads(tokenizer)
        Translator(config, trained, list)
        self.size, self.positions = config.vocab_size, config.max_positions
        self.vocabulary: dict[str, int] = specification["model"]["vocab"]
        self.special, self.pad = trained.special_ids, trained.pad_id
        self.bos, self.eos = self.vocabulary["<s>"], trained.eos_id
        self.begins_with_space = specification["pre_tokenizer"]["add_prefix_space"]
        self.spelling = self._spelling()
        # The text "</s>" is four characters: no token is looked for before the merges.
        self.merges = json.dumps({**specification, "post_processor": None, "added_tokens": []})

    def encode(self, op: Op, text: ir.Value) -> Lines:
        """
        text (B,) --> BPE (B, L) --> tokens (N,) --> ids (B, S)
        """
        blank = op.RegexFullMatch(text, pattern=BLANK)
        if self.begins_with_space:  # which the operator doesn't add
            text = replaced(op, text, "space", "(?s)^([^ ])", r" \1")
        outputs = op.HfJsonTokenizer(
            text, tokenizer_config=FAST, tokenizer_vocab=self.merges, _domain=TEXT_DOMAIN, _outputs=2
        )
        for value in outputs:
            value.type, value.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["lines", "line_length"])
        padded, mask = outputs
        shape = op.Concat(op.Shape(text), [1], axis=0)
        ends = [op.Expand(id, shape) for id in (self.bos, self.eos)]
        real = op.Concat(op.Expand(1, shape), mask, op.Expand(1, shape), axis=1)  # (B, L+2)
        index = op.Transpose(op.NonZero(real), perm=[1, 0])
        tokens = op.GatherND(op.Concat(ends[0], padded, ends[1], axis=1), index)  # (N,)
        count = op.ReduceSum(real, [1], keepdims=0)  # (B,)
        start = op.CumSum(count, 0, exclusive=1)
        return Lines.of(op, tokens, start, count, self.pad, self.positions, blank)


def is_byte_level(tokenizer: str) -> bool:
    """Return whether text of this tokenizer.json becomes bytes in GPT-2's words."""
    if side_texts(tokenizer) is not None:
        return False
    splitter = json.loads(tokenizer).get("pre_tokenizer") or {}
    return splitter.get("type") == "ByteLevel" and splitter.get("use_regex") is True
