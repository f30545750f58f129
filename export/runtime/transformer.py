"""Passes side by side on the threads of one session, where its operators would otherwise share each product among them.

An operator waits for the last of its threads, hundreds of times a pass; passes that run side by side wait once.

An exported model, run by ONNX Runtime: ids to ids, text to text. Needs numpy, onnxruntime and tokenizers.

    model = OnnxTransformer("onnx-folder")
    model.translate(["Good morning."], beam=4)

Shapes: B batch, S source, T target, L either, D model, V vocabulary.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from export.interface import DECODER_CPU, ENCODER_CPU, Request
from export.precision.table import PRECISIONS
from export.runtime import sessions as opening
from export.targets.portable.runtime import CausalGraphs, EncoderDecoderGraphs, EncoderGraphs, OnnxCache
from mlx_transformer.core.config import RELATIVE
from mlx_transformer.core.inputs import Ids, Sources, check_equally_long, check_ids
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.decoding.options import Hypothesis
from mlx_transformer.generation.passes import ONE_AT_A_TIME, Passes
from mlx_transformer.generation.settings import Settings, read_settings
from mlx_transformer.generation.verbs import TextVerbs
from mlx_transformer.page import table
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import fast_cores

from .folder import OnnxFolder, copy_export, open_folder
from .sessions import CPU, Opener, check_providers, run_aside

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from export.settings import ActivationsName, PrecisionName
    from export.targets.cpu.runtime import CpuModel
    from mlx_transformer.core.text_embedding import TextEmbedding
    from mlx_transformer.generation.embed import Embedder, GraphVectors
    from mlx_transformer.generation.translate import Translator
    from mlx_transformer.system.durable import Target
    from mlx_transformer.text.tokenizer import Tokenizer

T = TypeVar("T")
W = TypeVar("W")

JUST_BEGUN = 0.25
"""The share of a pass of which a thread may be behind the caller's and still compute the last pass alone. Two threads
that share passes take 0.6 of the time for each: to share the rest of the caller's, and then the last, takes longer than
the last alone if two thirds or more of the caller's are left."""


class SideBySide(Passes):
    """As many passes as a session has threads: one on the caller's, which is helped by those without a pass of their
    own, the others on a thread each of the session. No more cores are busy, and the weights are in memory once."""

    def __init__(self, threads: int):
        """threads: those of the session, the caller's among them."""
        self.at_once = threads

    def in_parallel(self, compute: Callable[[W], T], work: Sequence[W]) -> Iterator[T]:
        """Run `compute` on all work, the longest first in the list, in any order. If one fails, no other begins, and
        its exception is raised when those that run are over."""
        if len(work) < 2:
            yield from map(compute, work)
            return
        from concurrent.futures import wait  # with `logging`: who has one pass at a time does without

        left, lock, results = deque(work), threading.Lock(), SimpleQueue[T]()
        begun = perf_counter()  # the caller's pass that runs

        def take() -> list[W]:
            nonlocal begun
            with lock:
                begun = perf_counter()
                return [left.popleft()] if left else []

        def take_aside(seconds: float) -> list[W]:
            # The last one is over earlier if all threads share first what the caller is at, and then this; unless the
            # caller has only begun.
            with lock:
                apart = len(left) > 1 or (left and perf_counter() - begun < JUST_BEGUN * seconds)
                return [left.pop()] if apart else []

        def stop() -> None:
            with lock:
                left.clear()

        def aside() -> None:
            try:
                seconds = inf
                while part := take_aside(seconds):
                    at = perf_counter()
                    results.put(compute(*part))
                    seconds = perf_counter() - at
            except BaseException:
                stop()
                raise

        others = [self.pool.submit(aside) for _ in range(min(self.at_once, len(work)) - 1)]
        try:
            while part := take():
                yield compute(*part)
                while not results.empty():
                    yield results.get()
            for other in _begun(others):
                other.result()
            while not results.empty():
                yield results.get()
        finally:
            stop()
            wait(_begun(others))

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """The threads that wait for those of the session; kept, as it takes time to begin one."""
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(self.at_once - 1, initializer=run_aside)


def passes_of(threads: int | None, providers: Sequence[Any] | None) -> Passes:
    """Return how passes run in a session with so many threads (None: the machine's cores) and these providers."""
    cores = threads or fast_cores()
    return SideBySide(cores) if cores > 1 and check_providers(providers) == [CPU] else ONE_AT_A_TIME


def _begun(futures: Sequence[Future[None]]) -> list[Future[None]]:
    """Return those that have begun, and keep the others from it: their threads are busy with another call's passes."""
    return [future for future in futures if not future.cancel()]


NO_ATTENTION = "returns no attention: export it with --attention"


class OnnxTransformer(TextVerbs):
    """A folder that `export_onnx` or Optimum wrote, ready to run. `UserError` if it isn't one.

    Its methods may be called from several threads at once: what belongs to a call is nowhere but in that call.
    """

    def __init__(
        self,
        folder: str | Path,
        providers: Sequence[Any] | None = None,
        threads: int | None = None,
        precision: PrecisionName | None = None,
        verify: bool = True,
        activations: ActivationsName | None = None,
    ):
        """providers: ONNX Runtime's execution providers, each a name or a pair (name, options); default: the CPU's.
        threads: see `session_options`. precision: one of the folder's; default: float32, or the only one. verify:
        compare its files with the digests in its manifest, if it has one. activations: "float32" or "int8", what
        weights in blocks are multiplied with; default: what they were exported with. A package of standard operators
        exported with float32 runs with either, any other as it is."""
        self.folder: OnnxFolder = open_folder(folder, precision).with_activations(activations)
        self.config, self.where = self.folder.config, str(self.folder.path)
        self._open = Opener(self.folder, providers, verify)
        self.sessions = self._open(threads)
        self.graphs = self._graphs(threads)
        self.passes = passes_of(threads, providers)

    def _graphs(self, threads: int | None) -> Any:
        request, cores = self.folder.request, threads or fast_cores()
        if ENCODER_CPU not in self.sessions:
            return graphs_of(request, self.sessions)

        def of_cpu(sessions: Mapping[str, Any], of_operator: int | None, **more: Any) -> CpuModel:
            return graphs_of(request, sessions, listed=partial(self._open.listed, of_operator), **more)

        if cores == 1 or self.folder.weights_size > opening.SMALL:
            return of_cpu(self.sessions, threads)
        alone = lambda: of_cpu(self._open(1), 1)  # noqa: E731
        return of_cpu(self.sessions, threads, threads=cores, single_threaded=alone)

    def __repr__(self) -> str:
        facts = self.config.architecture, f"{parameter_count(self.config):,} parameters", self.folder.precision
        return f"OnnxTransformer({self.where!r}): {', '.join(facts)}"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: what the folder holds, sizes and choices."""
        size = sum(file.stat().st_size for file in self.folder.files)
        facts = {"folder": str(self.folder.path), "precision": self.folder.precision}
        facts |= {"graphs": ", ".join(self.folder.graphs), "files": f"{size / 1e6:,.1f} MB"}
        count = parameter_count(self.config)
        return table(f"OnnxTransformer: {count:,} parameters", {**facts, **self.config.summary()}.items())

    def save(self, folder: Target, force: bool = False) -> Path:
        """Copy the model's folder, compared with its manifests, and return the copy's path. `force`: replace an earlier
        ONNX folder of that name, once the new one is complete. `UserError` for a folder that holds something else."""
        return copy_export(self.folder.path, folder, force)

    @property
    def depends_on_batch(self) -> bool:
        """Whether a sentence's result may depend on those computed with it: see `precision.table.Precision`."""
        chosen = PRECISIONS[self.folder.precision]
        if chosen.form == "floats" or self.folder.activations == "float32":
            return False
        # Such a model's prompts can't be padded to where their sums don't feel it (`CausalGraphs.start`).
        misplaced = self.config.architecture == "decoder" and self.config.positions in RELATIVE
        return chosen.depends_on_batch or misplaced

    def decoding(self) -> AbstractContextManager[Any]:
        return nullcontext(self.graphs)

    def token_logits(self, ids: list[list[int]], **others: Any) -> NDArray[np.float32]:
        return self.logits(ids, **others)

    def token_vectors(self, ids: NDArray, mask: NDArray) -> NDArray[np.float32]:
        return self.encode(ids, mask)

    def search(
        self, ids: Ids | None = None, prefix: Ids | None = None, *, attention: bool = False, **options: Any
    ) -> list[list[Hypothesis]]:
        """Return the n best outputs of each input with their scores. attention: and each with its own, for which it is
        read once more; for folders exported with attention, and for ids."""
        if attention:
            self._check_attention()
            if ids is None:
                raise UserError("attention: is said of ids, not of inputs_embeds; leave it out")
        hypotheses = super().search(ids, prefix, **options)
        return self._with_attention(ids, hypotheses) if attention and ids is not None else hypotheses

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        from mlx_transformer.text.tokenizer import Tokenizer

        path = self.folder.tokenizer_path
        return Tokenizer.load(path) if path else None

    @cached_property
    def generation(self) -> Settings:
        return read_settings(self.folder.path, self.config)

    @cached_property
    def text_embedding(self) -> TextEmbedding | None:
        from mlx_transformer.core.text_embedding import read_embedding

        return read_embedding(self.folder.path, self.config.d_model)

    @property
    def graph_vectors(self) -> GraphVectors | None:
        from mlx_transformer.generation.embed import GraphVectors  # with the tokenizer's 7 MB

        if (made := self.folder.request.embedding) is None:
            return None
        return GraphVectors(made, self._of(EncoderGraphs).vectors, self.folder.request.by_token)

    def embedder(self, **options: Any) -> Embedder:
        return super().embedder(**options) if options else self._plain_embedder

    @cached_property
    def _plain_embedder(self) -> Embedder:
        """The one without options, kept: to make it takes a hundredth of what a small model takes for a text. It holds
        a copy of this object: one that held this object itself would keep the sessions open after it is gone."""
        _ = self.tokenizer, self.text_embedding  # once for both
        return TextVerbs.embedder(copy(self))

    @property
    def place(self) -> Path:
        return self.folder.path

    @property
    def shows_attention(self) -> bool:
        return self.folder.request.attention_layer is not None

    @property
    def translator(self) -> Translator:
        if self.folder.request.inputs_embeds:
            raise UserError(f"{self.where}: its encoder reads vectors, inputs_embeds: it translates no text")
        return super().translator

    def encode(self, ids: Any = None, mask: Any = None, **others: Any) -> NDArray[np.float32]:
        """Return the encoder's output (B, S, D) of ids (B, S), or with inputs_embeds=vectors of those (B, S, D) in a
        folder whose encoder reads them. mask (B, S): true on tokens, default everywhere."""
        return self._if(self.config.has_encoder).encode(*self._source(ids, mask, others))

    def decode(self, target_ids: Any, hidden: NDArray, mask: Any = None) -> NDArray[np.float32]:
        """Return teacher-forced logits (B, T, V) over an encoder's output (B, S, D) and its mask."""
        ids = self._ids(target_ids, self.config.vocab_size)
        return self._of(EncoderDecoderGraphs).decode(ids, hidden, _mask(mask, hidden))

    def logits(self, ids: Any = None, mask: Any = None, **others: Any) -> NDArray[np.float32]:
        """Return logits (B, L, V) of an encoder alone (inputs as for `encode`) or a decoder alone (padding on the
        left)."""
        graphs = self._of(EncoderGraphs, CausalGraphs)
        return graphs.logits(*self._source(ids, mask, others))

    def cross_attention(self, ids: Any, target_ids: Any, mask: Any = None) -> NDArray[np.float32]:
        """Return how much of each source token (B, S) is read at each position of a target (B, T), from which the next
        token is chosen: (B, T, S), the mean of a layer's heads, 0 where `mask` (B, S) is. `UserError` for a folder that
        was exported without attention."""
        self._check_attention()
        target_ids = self._ids(target_ids, self.config.vocab_size)
        return self.graphs.attention(*self._source(ids, mask), target_ids)

    def start(self, hidden: NDArray | None = None, mask: Any = None) -> OnnxCache:
        """Return a cache for `step`. Decoder-only: no hidden, and the mask (B, L) that the first step's tokens need."""
        if hidden is None:
            if mask is None:
                raise UserError("start: a decoder alone needs the mask of its first tokens (all ones without padding)")
            return self._of(CausalGraphs).begin(np.asarray(mask).astype(np.int64))
        return self._of(EncoderDecoderGraphs).begin(hidden, _mask(mask, hidden))

    def step(self, ids: Any, cache: OnnxCache) -> NDArray[np.float32]:
        """Return logits (B, L, V) after further tokens (B, L); the cache moves on by L."""
        return self._of(EncoderDecoderGraphs, CausalGraphs).step(self._ids(ids, self.config.vocab_size), cache)

    def _with_attention(self, ids: Ids, best: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        from mlx_transformer.generation.alignment import cross_weights_by  # not at the top, as the translator

        weights = cross_weights_by(
            lambda ids, real, read: self.graphs.attention(*self._source(ids, real), read),
            self.config,
        )
        sources = [row for row, hypotheses in zip(ids, best, strict=True) for _ in hypotheses]
        each = iter(weights(sources, [h.ids for hypotheses in best for h in hypotheses]))
        return [[replace(h, attention=next(each)) for h in hypotheses] for hypotheses in best]

    def _check_attention(self) -> None:
        if not self.shows_attention:
            raise UserError(f"{self.where}: {NO_ATTENTION}")

    def _of(self, *kinds: type) -> Any:
        return self._if(isinstance(self.graphs, kinds))

    def _if(self, has_it: bool) -> Any:
        if not has_it:
            raise UserError(f"{self.where}: architecture={self.config.architecture!r} has no such pass")
        return self.graphs

    def _source(
        self, ids: Any, mask: Any, others: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[dict[str, NDArray], NDArray[np.int64]]:
        """Return what the model reads, by value: (B, L) ids or (B, L, D) vectors, whichever is given; and its mask (B,
        L)."""
        source = Sources.of(self.config, "ids", ids=ids, **others).stacked()
        return source, _mask(mask, next(iter(source.values())))

    def _ids(self, ids: Any, vocab_size: int) -> NDArray[np.int64]:
        rows = check_ids(ids, vocab_size, "ids")
        check_equally_long(rows, self.config, "ids")
        return np.stack(rows)


def graphs_of(request: Request, sessions: Mapping[str, Any], **of_cpu: Any) -> Any:
    """Return the graphs of one folder, by their names, as one model; of_cpu: arguments of `CpuModel` alone."""
    if ENCODER_CPU in sessions:  # imported here: a folder imports only what runs it
        from export.targets.cpu.runtime import CpuModel

        return CpuModel(request, sessions[ENCODER_CPU], sessions[DECODER_CPU], **of_cpu)
    kinds = {"encoder-decoder": EncoderDecoderGraphs, "decoder": CausalGraphs, "encoder": EncoderGraphs}
    return kinds[request.config.architecture](request, sessions)


def _mask(mask: Any, like: NDArray) -> NDArray[np.int64]:
    """Return (B, L) for an input (B, L) or (B, L, D)."""
    shape = like.shape[:2]
    if mask is None:
        return np.ones(shape, np.int64)
    mask = np.asarray(mask).astype(np.int64)
    if mask.shape != shape:
        raise UserError(f"mask: its shape {mask.shape} differs from that of the input, {shape}")
    return mask
