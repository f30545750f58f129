"""Text to vectors with any encoder: prompt + text -> ids -> encoder -> pooling (`core/text_embedding.py`).

Texts of about one length share a forward pass. They are padded to the same multiple as a text by itself, so a text's
vector does not depend on its batch. On MLX its last bits do: a matrix product with more rows sums in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import (
    BATCH_TOKENS,
    ONE_AT_A_TIME,
    SOURCE_IDS,
    Ids,
    Passes,
    Sources,
    companions,
    of_one_length,
)
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .text_options import EmbedOptions
from .translate import as_lines, fitting_tokenizer

MULTIPLE = 4
"""Rows are padded to a multiple of this; the reason is at `SOURCE_MULTIPLE` in `export/targets/portable/runtime.py`."""
SHORT, ALIKE = 64, 2
"""Which lengths may share a pass when the graph has a row for each token: all at most SHORT, or the longest at most
ALIKE times the shortest. Attention still computes the padding."""
CACHED_TOKENS = 384
"""Tokens of a pass when the graph has a row for each token. It is enough for matrix products to run at a core's full
speed, and few enough for an operator's output to be in the cache when the next one reads it."""
SHARED_TOKENS = 64
"""Fewest tokens worth a pass in another thread: with fewer, most of the time goes into reading the weights."""


class GraphVectors(NamedTuple):
    """A graph that computes the vectors of `embedding` itself: `compute(inputs, mask)`, inputs as from
    `Sources.padded`."""

    embedding: TextEmbedding
    compute: Callable[[dict[str, NDArray], NDArray], NDArray]
    by_token: bool = False
    """The graph has a row for each token, so a batch of several lengths is cheaper than one pass for each."""


class Embedder:
    """Tokenizer, encoder (`token_vectors(ids, mask)`) and pooling in one."""

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer: Tokenizer | None,
        embedding: TextEmbedding | None,
        token_vectors: Callable[[NDArray, NDArray], Any],
        where: str = "model",
        graph: GraphVectors | None = None,
        passes: Passes = ONE_AT_A_TIME,
        **options: Any,
    ) -> None:
        """where: the model's name in error messages. graph: used if it computes exactly the vectors asked for. passes:
        how forward passes are scheduled. options: fields of `EmbedOptions`.

        Raises `UserError` if the options are wrong, or if neither the model nor `pooling` says how to make a vector.
        """
        self.config, self.where, self.token_vectors = config, where, token_vectors
        self._tokenizer, self._passes = tokenizer, passes
        self._vocab_size, self._companions = SOURCE_IDS.size(config), [entry.name for entry in companions(config)]
        settings = EmbedOptions(**options)
        self.kind = settings.kind
        if settings.kind != "dense" and (embedding is None or settings.kind not in embedding.kinds):
            raise UserError(
                "{}: {kind}: the model has no such head; its texts have one vector each", where, kind=settings.kind
            )
        if embedding is None and settings.pooling is None:
            raise UserError(
                "{}: doesn't say how a text's vector is made: give {pooling}, or how it was trained for it",
                where,
                pooling="mean",
            )
        embedding = embedding or TextEmbedding()
        if settings.pooling is not None:
            if embedding.dense:
                raise UserError(
                    "{pooling!r}: its dense layers were made for its own pooling; leave it out",
                    pooling=settings.pooling,
                )
            embedding = replace(embedding, pooling=(settings.pooling,))
        if settings.normalize is not None:
            embedding = replace(embedding, normalize=settings.normalize)
        self.embedding, self.width = embedding, embedding.width(config.d_model)
        if settings.dimensions is not None and settings.dimensions > self.width:
            raise UserError("{dimensions}: the model's vectors have {}", self.width, dimensions=settings.dimensions)
        self.dimensions = settings.dimensions or self.width
        whole = self.dimensions == self.width and embedding.prompt_counts
        self._graph = graph if graph is not None and whole and graph.embedding == embedding.arithmetic else None
        self.prompt = embedding.prompt(settings.prompt_name) if settings.prompt is None else settings.prompt
        self.most = min(embedding.max_length or config.max_positions, config.max_positions)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `UserError` if there is none, or if the model isn't an encoder."""
        what = "a text's vector"
        return fitting_tokenizer(self.config, self._tokenizer, self.where, "encoder", what, words=False)

    def rows(
        self, texts: Sequence[str], first_line: int = 1, on_overlong: Callable[[int], None] | None = None
    ) -> list[list[int]]:
        """Return the ids of each text, with the prompt before it.

        A text that is too long is cut; `on_overlong` is called with its number, counted from `first_line`.
        """
        rows = self.tokenizer.encode_batch([prepared(self.prompt + text, self.embedding) for text in as_lines(texts)])
        behind = self._behind
        for i, ids in enumerate(rows):
            if len(ids) > self.most:
                if on_overlong is not None:
                    on_overlong(first_line + i)
                rows[i] = [*ids[: self.most - behind], *ids[len(ids) - behind :]]
        return rows

    def vectors(
        self, rows: Ids, done: Callable[[float], None] = lambda share: None, of_text: bool = True
    ) -> NDArray[np.float32]:
        """Return the vectors (N, W) of N rows of ids.

        of_text: the rows are from `rows`, so they begin with the prompt. done: called with the finished share.
        """
        skipped = self._prompt_tokens() if of_text and self.prompt and not self.embedding.prompt_counts else 0

        def pooled(outputs: NDArray[np.float32], mask: NDArray[np.int64]) -> NDArray[np.float32]:
            whole = self._graph is not None
            return outputs if whole else self.embedding.vectors(outputs, mask, skipped, self.dimensions)

        if len(rows) == 1:  # a shortcut without grouping, for latency
            vectors = pooled(*self._compute(*self._alone(rows), self._graph))
            done(1.0)
            return vectors
        vectors = np.zeros((len(rows), self.dimensions), np.float32)
        for part, outputs, mask in self._computed(rows, self._graph, done):
            vectors[part] = pooled(outputs, mask)
        return vectors

    def made(self, rows: Ids, done: Callable[[float], None] = lambda share: None, of_text: bool = True) -> Any:
        """Return the vectors of the chosen `kind` for rows of ids; arguments as for `vectors`.

        dense: an array (N, W). sparse: {token id: weight} for each row, with the largest positive weight of each id;
        special tokens and the unknown word are left out. multi: an array (L - 1, W) for each row, without the first
        token.
        """
        if self.kind == "dense":
            return self.vectors(rows, done, of_text)
        c = self.config
        special = {c.pad_id, c.bos_id, c.eos_id, *([self._tokenizer.unk_id] if self._tokenizer else [])}
        vectors: list[Any] = [None] * len(rows)
        for part, outputs, mask in self._computed(rows, None, done):
            for i, memory, real in zip(part, outputs, mask, strict=True):
                tokens = memory[real == 1]
                if self.kind == "multi":
                    vectors[i] = self.embedding.token_vectors(tokens)
                    continue
                vectors[i] = {}
                for id, weight in zip(rows[i], self.embedding.token_weights(tokens).tolist(), strict=True):
                    if id not in special and weight > vectors[i].get(id, 0):
                        vectors[i][id] = weight
        return vectors

    def _computed(
        self, rows: Ids, graph: GraphVectors | None, done: Callable[[float], None]
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.float32], NDArray[np.int64]]]:
        """Yield for each pass the row indices, the output, and the mask (B, L). The output is the encoder's (B, L, D)
        or the graph's vectors (B, W)."""
        if not len(rows):
            return
        sources, most = Sources.of(self.config, "rows", ids=rows), self.config.max_positions
        at_once = self._passes.at_once
        by_token = graph is not None and graph.by_token
        batches = _mixed(sources.lengths, at_once) if by_token else _batches(sources.lengths, most, at_once)
        computed = 0
        for part, (outputs, mask) in self._passes.in_parallel(
            lambda part: (part, self._compute(*sources[part].padded(MULTIPLE, most), graph)), batches
        ):
            yield part, outputs, mask
            computed += len(part)
            done(computed / len(rows))

    def _alone(self, rows: Ids) -> tuple[dict[str, NDArray], NDArray[np.int64]]:
        """Do the work of `Sources.padded` for a single row in few calls.

        A text takes a few milliseconds. Once its pass has emptied the cache, each Python call of the next text costs
        some hundredths of a millisecond.
        """
        most, ids = self.config.max_positions, rows[0] if type(rows) is list else None
        if type(ids) is not list or {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= self._vocab_size:
            return Sources.of(self.config, "rows", ids=rows).padded(MULTIPLE, most)
        rest = max(0, min(-len(ids) % MULTIPLE, most - len(ids)))
        arrays = {SOURCE_IDS.name: np.array([ids + [self.config.pad_id] * rest], np.int64)}
        for name in self._companions:
            arrays[name] = np.zeros((1, len(ids) + rest), np.int64)
        return arrays, np.array([[1] * len(ids) + [0] * rest], np.int64)

    def _compute(
        self, inputs: dict[str, NDArray], mask: NDArray[np.int64], graph: GraphVectors | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the encoder's output (B, L, D) or the graph's vectors (B, W), and the mask (B, L)."""
        if (longest := mask.shape[1]) > self.config.max_positions:
            raise UserError(f"rows: {longest} tokens, the model takes at most {self.config.max_positions}")
        made = self.token_vectors(inputs[SOURCE_IDS.name], mask) if graph is None else graph.compute(inputs, mask)
        outputs = np.asarray(made, np.float32)
        if np.count_nonzero(np.isfinite(outputs)) < outputs.size:
            raise UserError(f"{self.where}: its output is not finite; check its weights")
        return outputs, mask

    def _prompt_tokens(self) -> int:
        """Count the prompt's tokens, the start token included and the end token not."""
        return len(self.tokenizer.encode(prepared(self.prompt, self.embedding))) - self._behind

    @property
    def _behind(self) -> int:
        """How many tokens stand behind each text: its end, or those that a decoder's tokenizer puts there."""
        return len(self.tokenizer.ends[1]) if self.tokenizer.is_makers else 1


def prepared(text: str, embedding: TextEmbedding) -> str:
    """Return the text as the tokenizer gets it: stripped, and in lower case if the model wants that."""
    text = text.strip()
    return text.lower() if embedding.lower_case else text


def _batches(lengths: NDArray, most: int, at_once: int = 1) -> list[NDArray[np.intp]]:
    """Group rows by padded length, longest first. at_once: passes that run at the same time and share BATCH_TOKENS."""
    return of_one_length(np.minimum(-(-lengths // MULTIPLE) * MULTIPLE, most), BATCH_TOKENS // at_once)


def _mixed(lengths: NDArray, at_once: int = 1) -> list[NDArray[np.intp]]:
    """Group rows where padding costs little and larger batches gain nothing.

    Rows of similar length go together, longest first; the number of passes is about a multiple of `at_once`, all of
    about one size.
    """
    if at_once == 1:
        return _alike(lengths, CACHED_TOKENS)
    total = int(lengths.sum())
    rounds = math.ceil(total / (at_once * CACHED_TOKENS))
    count = max(1, min(rounds * at_once, total // SHARED_TOKENS))
    most = min(math.ceil(total / count), CACHED_TOKENS)
    while len(parts := _alike(lengths, most)) > count and most < CACHED_TOKENS:
        most = min(most + 2 * MULTIPLE, CACHED_TOKENS)
    return parts


def _alike(lengths: NDArray, most: int) -> list[NDArray[np.intp]]:
    """Group rows of similar length, longest first, each group with at most `most` tokens."""
    order = np.argsort(-lengths, kind="stable")
    parts, first, tokens = [], 0, 0
    for i, length in enumerate(lengths[order].tolist()):
        tokens += length
        if i > first and (tokens > most or lengths[order[first]] > max(SHORT, ALIKE * length)):
            parts.append(order[first:i])
            first, tokens = i, length
    return [*parts, order[first:]]
