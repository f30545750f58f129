"""Text in, text out, around any search: splits overlong lines, keeps empty lines, and tokenizes.

lines -> pieces that fit the model -> ids -> search -> text -> a translation per line, in order
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, get_args

from mlx_transformer.core.config import Architecture, TransformerConfig
from mlx_transformer.decoding.options import Hypothesis
from mlx_transformer.system.errors import Name, Text, UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .alignment import Alignment, CrossWeights, align
from .text_options import Overlong

USES = {"encoder-decoder": "translate", "decoder": "generate", "encoder": "fill"}
"""The command for each architecture."""
HEAD_USES = {"classes": "classify", "token-classes": "tag", "spans": "answer", "hidden": "embed", "pooled": "embed"}
"""{kind of an encoder's head without logits of words: its command}"""

_SENTENCE_END = re.compile(r"[.!?…。!?]['\")\]»”’]*(?=\s)|[。!?]")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Translation:
    """A translation of a line. score: the hypothesis' score, summed over the pieces of a split line."""

    text: str
    score: float
    alignment: Alignment | None = None
    """Links between source and target words, if asked for."""


class Translator:
    """A search, `search(ids, **options)` -> n-best hypotheses of each row, with a tokenizer at both ends."""

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer: Tokenizer | None,
        search: Callable[..., list[list[Hypothesis]]],
        where: str = "model",
        generate: Callable[..., list[list[int]]] | None = None,
        *,
        shows_attention: bool = False,
        reserved: int = 0,
        prefix: str = "",
    ):
        """where: the model's name in error messages.
        generate: `generate(ids, **options)` -> best ids of each row, used when no scores are needed.
        shows_attention: `search(ids, attention=True)` returns cross-attention with its hypotheses.
        reserved: source positions that text may not take, e.g. 1 for a language token.
        prefix: text before every line, and before every piece of a line that is split, e.g. T5's task.
        Raises `UserError` if the model can't translate text.
        """
        tokenizer = fitting_tokenizer(config, tokenizer, where, "encoder-decoder", "translating")
        self.config, self.tokenizer, self.search, self.generate = config, tokenizer, search, generate
        self.shows_attention, self.most = shows_attention, config.max_positions - reserved
        self.prefix = prefix

    def with_prefix(self, prefix: str | None) -> Translator:
        """Return a copy with another prefix; None keeps the prefix."""
        if prefix is None:
            return self
        if not isinstance(prefix, str):
            raise UserError("{task_prefix} must be text", task_prefix=f"{prefix!r:.60}")
        chosen = copy(self)
        chosen.prefix = prefix
        return chosen

    def n_best(
        self,
        lines: str | Sequence[str],
        *,
        overlong: Overlong = "error",
        first_line: int = 1,
        scored: bool = True,
        aligned: bool | CrossWeights = False,
        on_overlong: Callable[[int], None] | None = None,
        **options: Any,
    ) -> list[list[Translation]]:
        """Return the `n_best` translations of each line, best first.

        first_line: the number of the first line in messages. on_overlong: called with the number of each line that is
        too long.
        scored=False: scores may be 0; only the order of the translations counts.
        aligned: add alignments, from the search's own attention (True) or from a `CrossWeights`.
        Raises `UserError` for wrong options, and for an overlong line if overlong="error".
        """
        lines = as_lines(lines)
        owners, rows = self.rows(lines, overlong, first_line, on_overlong)
        if aligned and self.prefix:
            raise UserError(
                Text("alignments count the words of the text, before which a {task_prefix} stands: leave one out")
            )
        if aligned is True:
            if not self.shows_attention:
                raise UserError(
                    "alignments need the weights of cross-attention: export the model with --attention, or run"
                    " translate --alignment"
                )
            hypotheses = self.search(rows, attention=True, **options)
        elif scored or self.generate is None or options.get("n_best", 1) != 1:
            hypotheses = self.search(rows, **options)
        else:
            hypotheses = [[Hypothesis(ids, 0.0)] for ids in self.generate(rows, **options)]
        return self.texts(
            len(lines), owners, hypotheses, self._alignments(rows, hypotheses, aligned) if aligned else None
        )

    def rows(
        self,
        lines: Sequence[str],
        overlong: Overlong = "error",
        first_line: int = 1,
        on_overlong: Callable[[int], None] | None = None,
    ) -> tuple[list[int], list[list[int]]]:
        """Return the rows of ids to search, and for each row the index of its line.

        An empty or skipped line has no row, a split line has several: e.g. owners [0, 2, 2] if line 1 is empty and line
        2 is split.
        """
        lines = as_lines(lines)
        if overlong not in get_args(Overlong):
            raise UserError("{overlong!r} is not one of {}", ", ".join(get_args(Overlong)), overlong=overlong)
        owners, rows = [], []
        for i, ids in enumerate(self._encode(lines)):
            if lines[i].strip():
                if on_overlong is not None and len(ids) > self.most:
                    on_overlong(first_line + i)
                pieces = self._fit(lines[i], ids, first_line + i, overlong)
                owners += [i] * len(pieces)
                rows += pieces
        return owners, rows

    def texts(
        self,
        lines: int,
        owners: Sequence[int],
        hypotheses: list[list[Hypothesis]],
        alignments: Sequence[Sequence[Alignment]] | None = None,
    ) -> list[list[Translation]]:
        """Return the translations of `lines` lines from the hypotheses of their rows; owners as from `rows`."""
        texts = (self.tokenizer.decode_batch([h.ids for h in row]) for row in hypotheses)
        weights = alignments or [[None] * len(row) for row in hypotheses]
        pieces = [
            [Translation(text, h.score, a) for text, h, a in zip(decoded, row, aligned, strict=True)]
            for decoded, row, aligned in zip(texts, hypotheses, weights, strict=True)
        ]
        return join(lines, owners, pieces)

    def _alignments(
        self, rows: Sequence[list[int]], best: list[list[Hypothesis]], aligned: bool | CrossWeights
    ) -> list[list[Alignment]]:
        sources = [row for row, hypotheses in zip(rows, best, strict=True) for _ in hypotheses]
        outputs = [h for hypotheses in best for h in hypotheses]
        if isinstance(aligned, bool):
            weights = iter([h.attention for h in outputs if h.attention is not None])
        else:
            weights = iter(aligned(sources, [h.ids for h in outputs]))
        return [
            [align(self.tokenizer, next(weights), row, h.ids) for h in hypotheses]
            for row, hypotheses in zip(rows, best, strict=True)
        ]

    def _encode(self, lines: Sequence[str]) -> list[list[int]]:
        lines = [self.prefix + line for line in lines] if self.prefix else lines
        return self.tokenizer.source.encode_batch(lines)

    def _fit(self, line: str, ids: list[int], number: int, overlong: Overlong) -> list[list[int]]:
        """Return the ids of the line, or of its pieces; none is longer than the model takes."""
        limit = self.most
        if len(ids) <= limit:
            return [ids]
        if overlong == "truncate":
            return [[*ids[: limit - 1], self.config.eos_id]]
        if overlong == "split":
            return list(self._pieces(line, ids))
        if overlong == "skip":
            return []
        raise UserError(
            "line {}: {} tokens, the model takes at most {}; shorten it, or choose {}, {} or {}",
            *(number, len(ids), limit, *(Name("overlong", each) for each in ("split", "truncate", "skip"))),
        )

    def _pieces(self, text: str, ids: list[int]) -> Iterator[list[int]]:
        """Halve until every piece fits: at the sentence end nearest the middle, else at white space, else in the
        middle."""
        limit = self.most
        if len(ids) <= limit:
            yield ids
            return
        if len(text) < 2:
            yield [*ids[: limit - 1], self.config.eos_id]
            return
        middle = len(text) / 2
        for pattern in (_SENTENCE_END, _SPACE):
            ends = sorted((match.end() for match in pattern.finditer(text)), key=lambda end: abs(end - middle))
            cut = next((end for end in ends if text[:end].strip() and text[end:].strip()), None)
            if cut is not None:
                break
        else:
            cut = int(middle)
        halves = [text[:cut].strip(), text[cut:].strip()]
        for half, half_ids in zip(halves, self._encode(halves), strict=True):
            if half:
                yield from self._pieces(half, half_ids)


def fitting_tokenizer(
    config: TransformerConfig,
    tokenizer: Tokenizer | None,
    where: str,
    needed: Architecture,
    what: str,
    words: bool = True,
) -> Tokenizer:
    """Return the tokenizer if the model and it can do `what`.

    Raises `UserError`, which begins with `where`, if the architecture is not `needed`, if `words` and the head gives no
    logits of words, or if the tokenizer is missing or doesn't fit the model.
    """
    if config.architecture != needed:
        article = "a" if needed == "decoder" else "an"
        own = HEAD_USES.get(config.head.kind, USES[config.architecture])
        use = f"architecture={config.architecture!r} is for {own}"
        raise UserError(f"{where}: {what} needs {article} {needed}; {use}")
    if words and (own := HEAD_USES.get(config.head.kind)) is not None:
        raise UserError(f"{where}: {what} needs logits of words; its head is of kind {config.head.kind!r}, for {own}")
    if tokenizer is None:
        raise UserError(f"{where}: has no tokenizer.json, so it takes only ids: put the tokenizer into its folder")
    tokenizer.check_fits(config, where)
    return tokenizer


def as_lines(lines: str | Iterable[str]) -> list[str]:
    """Return a list of lines; a string is one line. Raises `UserError` for anything but text."""
    if isinstance(lines, bytes) or not isinstance(lines, Iterable):
        raise UserError(f"expected text, or a list of lines, not {type(lines).__name__}")
    listed = [lines] if isinstance(lines, str) else list(lines)
    for number, line in enumerate(listed, start=1):
        if not isinstance(line, str):
            raise UserError(f"line {number}: must be text, not {type(line).__name__}")
    return listed


def join(lines: int, owners: Sequence[int], pieces: Sequence[list[Translation]]) -> list[list[Translation]]:
    """Join the translations of a line's pieces with spaces: the k-th best of a piece with the k-th best of the next.

    Returns a list for each of `lines` lines; a line without pieces gets one empty translation.
    """
    joined: list[list[Translation]] = [[] for _ in range(lines)]
    for i, new in zip(owners, pieces, strict=True):
        both = zip(joined[i], new, strict=False)
        joined[i] = [_joined(a, b) for a, b in both] if joined[i] else new
    return [translations or [Translation("", 0.0)] for translations in joined]


def _joined(first: Translation, second: Translation) -> Translation:
    alignment = None
    if first.alignment is not None and second.alignment is not None:
        alignment = first.alignment + second.alignment
    return Translation(f"{first.text} {second.text}", first.score + second.score, alignment)
