"""The search on MLX: its array operations, and a network in MLX as a model of it. The only file here that loads MLX.

Shapes: B sentences, R rows (hypotheses), L prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import mlx.core as mx
import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import SOURCE_IDS, Ids, Sources
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.device import choices
from mlx_transformer.generation import likelihood
from mlx_transformer.generation import search as shared
from mlx_transformer.generation.arrays import Arrays
from mlx_transformer.generation.options import Hypothesis
from mlx_transformer.generation.stream import stream
from mlx_transformer.generation.stream import stream_ids as shared_stream_ids
from mlx_transformer.generation.translate import Translator

T = TypeVar("T")


class Cache(Protocol):
    """Keys and values of the rows that are decoded."""

    def repeat(self, times: int) -> None: ...
    def reorder(self, rows: mx.array) -> None: ...
    def keep(self, rows: mx.array) -> None: ...


class Network(Protocol):
    """What the search asks of a network: `nn.Transformer` is one."""

    config: TransformerConfig

    @property
    def training(self) -> bool: ...
    def train(self, mode: bool = True) -> Any: ...
    @property
    def encode(self) -> Callable[..., mx.array]: ...
    def start(
        self,
        memory: mx.array | None = None,
        source_mask: np.ndarray | None = None,
        *,
        prompt_mask: np.ndarray | None = None,
    ) -> Any: ...
    def step(self, ids: mx.array, cache: Any, *, last: bool = False) -> mx.array: ...


class MlxArrays:
    """MLX is lazy: steps are queued with `async_eval`, the host looks at the one before."""

    lazy = True

    def __init__(self) -> None:
        self.check_every, self.drop_below = choices().check_every, choices().drop_below

    asarray = staticmethod(mx.array)
    queue = staticmethod(mx.async_eval)
    max = staticmethod(mx.max)
    sum = staticmethod(mx.sum)
    cumsum = staticmethod(mx.cumsum)
    softmax = staticmethod(mx.softmax)
    logsumexp = staticmethod(mx.logsumexp)
    sort = staticmethod(mx.sort)
    where = staticmethod(mx.where)
    take = staticmethod(mx.take)
    take_along_axis = staticmethod(mx.take_along_axis)
    concatenate = staticmethod(mx.concatenate)
    stack = staticmethod(mx.stack)
    arange = staticmethod(mx.arange)

    def numpy(self, x: mx.array) -> np.ndarray:
        return np.array(x)

    def float32(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32)

    def argmax(self, x: mx.array, axis: int) -> mx.array:
        return mx.argmax(x, axis=axis).astype(mx.int32)

    def argsort(self, x: mx.array, axis: int) -> mx.array:
        return mx.argsort(x, axis=axis).astype(mx.int32)

    def full(self, shape: Sequence[int], value: float) -> mx.array:
        return mx.full(tuple(shape), value, mx.float32)


class MlxModel:
    """A network as `steps.Model`."""

    def __init__(self, model: Network):
        self.model, self.config = model, model.config
        self.arrays = cast(Arrays, MlxArrays())  # MLX's functions name their arguments otherwise
        self.extends_positions = model.config.positions != "learned"

    def start(self, sources: Sources) -> tuple[MlxDecoder, mx.array]:
        """Encode the sources and feed the start token; decoder-only: read the prompts, padded on the left, at once."""
        c = self.config
        arrays, mask = sources.padded(left=not c.has_encoder)
        tokens = None if mask.all() else mask.astype(bool)
        given = {name: mx.array(x.astype(np.int32) if x.dtype == np.int64 else x) for name, x in arrays.items()}
        if c.has_encoder:
            cache = self.model.start(self.model.encode(source_mask=tokens, **given), tokens)
            ids = mx.full((len(sources), 1), c.bos_id, mx.int32)
        else:
            cache, ids = self.model.start(prompt_mask=tokens), given[SOURCE_IDS.name]
        return MlxDecoder(self.model, cache), self.model.step(ids, cache, last=True)[:, 0]


class MlxDecoder:
    """One batch in decoding, as `steps.Decoder`."""

    def __init__(self, model: Network, cache: Cache):
        self.model, self.cache = model, cache

    def step(self, ids: mx.array) -> mx.array:
        return self.model.step(ids[:, None], self.cache)[:, 0]

    def repeat(self, times: int) -> None:
        self.cache.repeat(times)

    def reorder(self, rows: mx.array) -> None:
        self.cache.reorder(rows)

    def keep(self, rows: mx.array) -> None:
        self.cache.keep(rows)


def generate(model: Network, ids: Ids | None = None, prefix: Ids | None = None, **options: Any) -> list[list[int]]:
    """New token ids of each input's best output; see `generation.search.search` for the arguments and errors."""
    with evaluating(model):
        return shared.generate(MlxModel(model), ids, prefix, **options)


def search(model: Network, ids: Ids | None = None, prefix: Ids | None = None, **options: Any) -> list[list[Hypothesis]]:
    """The n best outputs of each input with their scores; see `generation.search.search`."""
    with evaluating(model):
        return shared.search(MlxModel(model), ids, prefix, **options)


def log_probabilities(model: Network, ids: Ids, targets: Ids, **options: Any) -> list[np.ndarray]:
    """Log p of every token of each target; see `generation.likelihood.log_probabilities`."""
    with evaluating(model):
        return likelihood.log_probabilities(MlxModel(model), ids, targets, **options)


@contextmanager
def evaluating(model: Network) -> Iterator[None]:
    """Without dropout; afterwards the model is in the mode it was in."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)


def stream_ids(model: Network, ids: Sequence[int], prefix: Sequence[int] = (), **options: Any) -> Iterator[int]:
    """New token ids of one input, each as soon as it is decided; see `generation.stream.stream_ids`."""
    return _while_evaluating(model, shared_stream_ids(MlxModel(model), ids, prefix, **options))


def _while_evaluating(model: Network, items: Iterator[T]) -> Iterator[T]:
    with evaluating(model):
        yield from items


class MlxTranslator(Translator):
    """`translate(lines, beam=..., ...)` with a network and its tokenizer."""

    def __init__(self, model: Network, tokenizer: Tokenizer | None, where: str = "model"):
        super().__init__(model.config, tokenizer, partial(search, model), where, partial(generate, model))
        self.model = model

    def log_probabilities(self, ids: Ids, targets: Ids, **options: Any) -> list[np.ndarray]:
        """Log p of every token of each target; see `generation.likelihood.log_probabilities`."""
        return log_probabilities(self.model, ids, targets, **options)

    def stream(self, line: str, **options: Any) -> Iterator[str]:
        """The translation of one line in pieces, as they are decided; see `generation.stream.stream`."""
        return _while_evaluating(self.model, stream(MlxModel(self.model), self, line, **options))
