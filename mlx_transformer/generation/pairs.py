"""The probability of given translations, pair by pair: text in, a line of numbers out."""

from __future__ import annotations

import json as json_lines
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.data.corpus import read_parallel
from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.progress import quiet_progress

from .lines import PART_LINES
from .output import claim_lines, writer
from .text_options import OverlongPair
from .verbs import TextVerbs


def score_pairs(
    model: TextVerbs,
    tokenizer: Tokenizer,
    source: Path,
    target: Path,
    output: Target | None = None,
    *,
    json: bool = False,
    overlong: OverlongPair = "error",
    force: bool = False,
) -> None:
    """Write for each line of two files log p of the target's line given the source's, one line each, to a file
    (default: standard output), which appears whole or not at all; `force` replaces an earlier one.

    A line holds the sum, and after a tab the tokens' log p, separated by spaces, the end token's last. As JSON it is
    {"source": ..., "target": ..., "log_p": sum, "tokens": [...], "token_log_p": [...]}.

    overlong: a pair that is longer than the model takes is an
    error, before the first is computed, or has a line without numbers (JSON: null), counted on standard error. Raises
    `UserError` as `read_parallel` does too.
    """
    output = claim_lines("score", output, force, source, target)
    text = read_parallel(source, target)
    limit = model.config.max_positions
    fits: list[bool] = []
    for begin in range(0, len(text), PART_LINES):
        for i, pair in enumerate(_ids(tokenizer, text.source, text.target, begin), begin + 1):
            longest = max(map(len, pair))
            fits.append(longest <= limit)
            if longest > limit and overlong == "error":
                raise UserError(
                    "line {}: {} tokens, the model takes at most {}; shorten it, or choose {overlong}",
                    i,
                    longest,
                    limit,
                    overlong="skip",
                )
    target_file = writer(output, None, False)
    try:
        with quiet_progress("score" if output is not None or not sys.stdout.isatty() else None) as report:
            for begin in range(0, len(text), PART_LINES):
                pairs = list(_ids(tokenizer, text.source, text.target, begin))
                usable = [i for i in range(len(pairs)) if fits[begin + i]]

                def done(share: float, begin: int = begin, count: int = len(pairs)) -> None:
                    now = begin + round(share * count)
                    report(now / len(text), f"{now:,} of {len(text):,} pairs")

                ids, targets = [pairs[i][0] for i in usable], [pairs[i][1] for i in usable]
                values_of = dict(zip(usable, model.log_probabilities(ids, targets, done=done), strict=True))
                lines = []
                for i, (_, tokens) in enumerate(pairs):
                    values = values_of.get(i)
                    if json:
                        texts = {"source": text.source[begin + i], "target": text.target[begin + i]}
                        lines.append(_as_json(texts, tokenizer, tokens, values))
                    else:
                        lines.append(_as_text(values))
                target_file.write("".join(f"{line}\n" for line in lines).encode(errors="replace"))
        target_file.finish()
    finally:
        target_file.close()
    if skipped := fits.count(False):
        first = fits.index(False) + 1
        message = f"{skipped:,} of {len(text):,} pairs, the first of them line {first:,}: longer than the model takes"
        print(f"{source}: {message}, left empty", file=sys.stderr)


def _ids(
    tokenizer: Tokenizer, source: Sequence[str], target: Sequence[str], begin: int
) -> Iterator[tuple[list[int], list[int]]]:
    part = slice(begin, begin + PART_LINES)
    return zip(tokenizer.source.encode_batch(source[part]), tokenizer.encode_batch(target[part]), strict=True)


def _as_text(values: np.ndarray | None) -> str:
    if values is None:
        return "\t"
    return f"{_sum(values):.4f}\t{' '.join(f'{value:.4f}' for value in values)}"


def _as_json(texts: dict[str, Any], tokenizer: Tokenizer, ids: Sequence[int], values: np.ndarray | None) -> str:
    more = {} if values is None else {"token_log_p": [float(value) for value in values]}
    total = None if values is None else _sum(values)
    tokens = [tokenizer.token(id) for id in ids]
    return json_lines.dumps({**texts, "log_p": total, "tokens": tokens, **more}, ensure_ascii=False)


def _sum(values: np.ndarray) -> float:
    return math.fsum(values.tolist())
