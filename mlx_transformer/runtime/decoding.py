"""The search on MLX: its array operations, and an MLX network as the model of a search.

Shapes: B sentences, R rows (hypotheses), L prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np

from mlx_transformer.core.inputs import SOURCE_IDS, Sources
from mlx_transformer.decoding.arrays import Arrays
from mlx_transformer.decoding.steps import Decoder, Model, joins, reading
from mlx_transformer.device import tuning
from mlx_transformer.nn import Cache, Transformer
from mlx_transformer.nn.classifier import Classifier

if TYPE_CHECKING:
    from mlx_transformer.decoding.candidates import Among, Candidates


class MlxArrays:
    """MLX is lazy: steps are queued with `async_eval`, and the host reads results of the previous step."""

    lazy = True

    def __init__(self) -> None:
        self.check_every, self.drop_below = tuning().check_every, tuning().drop_below

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

    def marked(self, places: mx.array, width: int) -> mx.array:
        return mx.put_along_axis(mx.zeros((len(places), width), mx.bool_), places, mx.array(True), axis=1)

    def full(self, shape: Sequence[int], value: float) -> mx.array:
        return mx.full(tuple(shape), value, mx.float32)


class MlxModel(Model):
    """An MLX network as a `steps.Model`."""

    takes_back = True

    def __init__(self, model: Transformer, classifier: Classifier | None = None):
        """classifier: for candidate ids; None: logits of the whole vocabulary."""
        self.model, self.config, self.classifier = model, model.config, classifier
        self.arrays = cast(Arrays, MlxArrays())  # a cast, since MLX's arguments have other names
        kinds = {layer.positions for layer in model.config.layers("decoder")} if not model.config.has_encoder else set()
        # A decoder was made for texts up to `max_positions`: rotary angles beyond it would be computed, but not known.
        self.extends_positions = model.config.positions != "learned" and "rotary" not in kinds
        self.joins = joins(model.config)

    def start(self, sources: Sources) -> tuple[Decoder, mx.array]:
        """Encode the sources and run the start token; decoder-only: run the prompts, padded on the left.

        Returns the decoder and logits (B, V) of the first new tokens.
        """
        return reading(self, self._start, sources)

    def _start(self, sources: Sources) -> tuple[MlxDecoder, mx.array]:
        c = self.config
        arrays, mask = sources.padded(left=not c.has_encoder)
        tokens = None if mask.all() else mask.astype(bool)
        inputs: dict[str, Any] = {
            name: mx.array(x.astype(np.int32) if x.dtype == np.int64 else x) for name, x in arrays.items()
        }
        if c.has_encoder:
            cache = self.model.start(self.model.encode(source_mask=tokens, **inputs), tokens)
            ids = mx.full((len(sources), 1), sources.start, mx.int32)
        else:
            cache, ids = self.model.start(prompt_mask=tokens), inputs[SOURCE_IDS.name]
        decoder = MlxDecoder(self.model, cache, self.classifier)
        return decoder, decoder.extend(ids)

    def among(self, candidates: Candidates) -> Among:
        """A model whose classifier has only the candidates' rows."""
        from mlx_transformer.decoding.candidates import Among  # few searches have candidates

        classifier = self.model.classifier().among(mx.array(candidates.ids.astype(np.int32)))
        return Among(MlxModel(self.model, classifier), candidates, columns=False)


class MlxDecoder:
    """A batch being decoded, as a `steps.Decoder`."""

    def __init__(self, model: Transformer, cache: Cache, classifier: Classifier | None):
        self.model, self.cache, self.classifier = model, cache, classifier

    def step(self, ids: mx.array) -> mx.array:
        return self.model.step(ids[:, None], self.cache, among=self.classifier)[:, 0]

    def read_each(self, ids: mx.array) -> mx.array:
        return self.model.step(ids, self.cache, among=self.classifier)

    def take_back(self, count: int) -> None:
        self.cache.take_back(count)

    def extend(self, ids: mx.array) -> mx.array:
        logits = self.model.step(ids, self.cache, last=True, among=self.classifier)[:, 0]
        mx.async_eval(*self.cache.arrays())  # of a prompt's part that is all: nobody reads its logits
        return logits

    def join(self, other: MlxDecoder) -> None:
        self.cache.join(other.cache)

    def part(self, row: int, length: int, of: int) -> MlxDecoder | None:
        part = self.cache.part(row, length, of)
        return None if part is None else MlxDecoder(self.model, part, self.classifier)

    def shrink(self, lengths: Sequence[int]) -> None:
        self.cache.shrink(lengths)

    def repeat(self, times: int) -> None:
        self.cache.repeat(times)

    def reorder(self, rows: mx.array) -> None:
        self.cache.reorder(rows)

    def keep(self, rows: mx.array) -> None:
        self.cache.keep(rows)


@contextmanager
def evaluating(model: Transformer) -> Iterator[None]:
    """Turn dropout off in this block; then restore the model's mode."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        if training:  # setting a mode walks through all modules
            model.train()
