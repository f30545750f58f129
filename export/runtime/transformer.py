"""An exported model, run by ONNX Runtime: ids to ids, text to text. Needs numpy, onnxruntime and tokenizers.

    model = OnnxTransformer("onnx-folder")
    model.translate(["Good morning."], beam=4)

`SideBySide` runs several passes at the same time, each on a thread of the session. Otherwise the threads share each
product of a single pass, and an operator waits for the last of them, hundreds of times per pass. Passes side by side
wait only once.

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

from export.interface import DECODER_CPU, ENCODER_CPU, STEP_CPU, Request
from export.precision.table import PRECISIONS
from export.runtime import sessions as opening
from export.targets.portable.runtime import CausalGraphs, EncoderDecoderGraphs, EncoderGraphs, OnnxCache
from mlx_transformer.core.config import RELATIVE
from mlx_transformer.core.inputs import ONE_AT_A_TIME, Ids, Passes, Sources, check_equally_long, check_ids
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.decoding.options import Hypothesis
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
"""Decides whether a thread computes the last pass by itself: yes, if the caller has done less than this share of its
pass. Two threads that share a pass take 0.6 of its time. Sharing the rest of the caller's pass and then the last pass
takes longer than the last pass by itself if two thirds or more of the caller's pass are left."""


class SideBySide(Passes):
    """Runs as many passes at the same time as a session has threads.

    The caller's thread computes one pass, with the help of idle threads; every other pass has a thread of the session.
    No more cores are busy than the session has threads, and the weights are in memory only once.
    """

    def __init__(self, threads: int):
        """threads: of the session, including the caller's."""
        self.at_once = threads

    def in_parallel(self, compute: Callable[[W], T], work: Sequence[W]) -> Iterator[T]:
        """Run `compute` on all work, which must be sorted longest first; yields the results in any order.

        If a call fails, no other begins. Its exception is raised when the running calls have ended.
        """
        if len(work) < 2:
            yield from map(compute, work)
            return
        from concurrent.futures import wait  # here, since it imports logging, and a single pass doesn't need it

        left, lock, results = deque(work), threading.Lock(), SimpleQueue[T]()
        begun = perf_counter()  # start of the caller's current pass

        def take() -> list[W]:
            nonlocal begun
            with lock:
                begun = perf_counter()
                return [left.popleft()] if left else []

        def take_aside(seconds: float) -> list[W]:
            # The last pass ends earlier if all threads first share the caller's current pass and then the last, unless
            # the caller has just begun.
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
        """Threads that wait for the session's threads; kept, since starting a thread takes time."""
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(self.at_once - 1, initializer=run_aside)


def passes_of(threads: int | None, providers: Sequence[Any] | None) -> Passes:
    """How to run the passes of a session with these threads (None: all cores) and providers."""
    cores = threads or fast_cores()
    return SideBySide(cores) if cores > 1 and check_providers(providers) == [CPU] else ONE_AT_A_TIME


def _begun(futures: Sequence[Future[None]]) -> list[Future[None]]:
    """The futures that have begun; cancels the others, whose threads are busy with another call's passes."""
    return [future for future in futures if not future.cancel()]


NO_ATTENTION = "returns no attention: export it with --attention"


class OnnxTransformer(TextVerbs):
    """A model in a folder written by `export_onnx` or Optimum. Raises `UserError` if the folder is another kind.

    Its methods may be called from several threads at once, since all state of a call is local.

    >>> OnnxTransformer("onnx-folder", precision="int8", threads=2).translate("Good morning.")
    'Guten Morgen.'
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
        """Open the folder.

        providers: ONNX Runtime's execution providers, each a name or a pair (name, options); default: CPU.
        threads: threads per operator; default: all cores. precision: one of the folder's; default: float32, or the only
        one. verify: compare the files with the digests in the folder's manifest, if any. activations: "float32"
        or "int8", multiplied with weights in blocks; default: as exported. Only a folder in standard operators that was
        exported with float32 activations can run with "int8" instead.
        """
        self.folder: OnnxFolder = open_folder(folder, precision).with_activations(activations)
        self.config, self.where = self.folder.config, str(self.folder.path)
        self._open = Opener(self.folder, providers, verify)
        self.sessions = self._open(threads)
        self.graphs = self._graphs(threads)
        self.passes = passes_of(threads, providers)

    def _graphs(self, threads: int | None) -> Any:
        request, cores = self.folder.request, threads or fast_cores()
        if STEP_CPU in self.sessions:
            exact = PRECISIONS[self.folder.precision].form == "floats" or self.folder.activations == "float32"
            return graphs_of(request, self.sessions, exact=exact)
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
        """HTML for notebooks: the folder's files, sizes and config."""
        size = sum(file.stat().st_size for file in self.folder.files)
        facts = {"folder": str(self.folder.path), "precision": self.folder.precision}
        facts |= {"graphs": ", ".join(self.folder.graphs), "files": f"{size / 1e6:,.1f} MB"}
        count = parameter_count(self.config)
        return table(f"OnnxTransformer: {count:,} parameters", {**facts, **self.config.summary()}.items())

    def save(self, folder: Target, force: bool = False) -> Path:
        """Verify the model's folder against its manifests and copy it to `folder`; returns the copy's path.

        `force`: replace an earlier ONNX folder at this path, once the copy is complete. Raises `UserError` if files are
        damaged, or `folder` holds anything else.
        """
        return copy_export(self.folder.path, folder, force)

    @property
    def depends_on_batch(self) -> bool:
        """Whether a sentence's result may depend on the rest of its batch; see `precision.table.Precision`."""
        if not self.depends_on_rounding:
            return False
        # With relative positions prompts can't be padded to lengths that keep the order of sums (`CausalGraphs.start`).
        misplaced = self.config.architecture == "decoder" and self.config.positions in RELATIVE
        return PRECISIONS[self.folder.precision].depends_on_batch or misplaced

    @property
    def depends_on_rounding(self) -> bool:
        return PRECISIONS[self.folder.precision].form != "floats" and self.folder.activations != "float32"

    def decoding(self) -> AbstractContextManager[Any]:
        return nullcontext(self.graphs)

    def token_logits(self, ids: list[list[int]], **others: Any) -> NDArray[np.float32]:
        return self.logits(ids, **others)

    def token_vectors(self, ids: NDArray, mask: NDArray) -> NDArray[np.float32]:
        return self.encode(ids, mask)

    def search(
        self, ids: Ids | None = None, prefix: Ids | None = None, *, attention: bool = False, **options: Any
    ) -> list[list[Hypothesis]]:
        """The n best outputs of each input, with scores.

        attention: also give each output its cross-attention weights, computed by one more pass. Raises `UserError` if
        the folder was exported without attention, or if vectors (inputs_embeds) are given instead of ids.
        """
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
        from mlx_transformer.generation.embed import GraphVectors  # here, since it loads the tokenizer's 7 MB

        if (made := self.folder.request.embedding) is None:
            return None
        return GraphVectors(made, self._of(EncoderGraphs).vectors, self.folder.request.by_token)

    def embedder(self, **options: Any) -> Embedder:
        return super().embedder(**options) if options else self._plain_embedder

    @cached_property
    def _plain_embedder(self) -> Embedder:
        """The embedder without options. Kept, since making it takes a hundredth of a small model's time for a text.

        It holds a copy of this object: a reference cycle would keep the sessions open after the last use.
        """
        _ = self.tokenizer, self.text_embedding  # read once, for this object and the copy
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
        """The encoder's output (B, S, D) for ids (B, S).

        mask (B, S): True on tokens; default: no padding. If the folder's encoder reads vectors, give
        inputs_embeds=vectors (B, S, D) instead of ids.
        """
        return self._if(self.config.has_encoder).encode(*self._source(ids, mask, others))

    def decode(self, target_ids: Any, hidden: NDArray, mask: Any = None) -> NDArray[np.float32]:
        """Teacher-forced logits (B, T, V) of target_ids (B, T) over the encoder output `hidden` (B, S, D) and mask."""
        ids = self._ids(target_ids, self.config.vocab_size)
        return self._of(EncoderDecoderGraphs).decode(ids, hidden, _mask(mask, hidden))

    def logits(self, ids: Any = None, mask: Any = None, **others: Any) -> NDArray[np.float32]:
        """Logits (B, L, V) of an encoder-only or decoder-only model; inputs as for `encode`.

        The padding of a decoder-only model is on the left. An encoder's head may have another shape (`core/heads.py`).
        """
        graphs = self._of(EncoderGraphs, CausalGraphs)
        return graphs.logits(*self._source(ids, mask, others))

    def cross_attention(self, ids: Any, target_ids: Any, mask: Any = None) -> NDArray[np.float32]:
        """Cross-attention weights (B, T, S) of targets (B, T) over sources `ids` (B, S): the mean of a layer's heads.

        Row t shows how much of each source token the model reads to choose the token after t; it is 0 on padding.
        Raises `UserError` if the folder was exported without attention.
        """
        self._check_attention()
        target_ids = self._ids(target_ids, self.config.vocab_size)
        return self.graphs.attention(*self._source(ids, mask), target_ids)

    def start(self, hidden: NDArray | None = None, mask: Any = None) -> OnnxCache:
        """An empty cache for `step`. Give the encoder's output `hidden` (B, S, D) and its mask (B, S).

        Decoder-only: give only the mask (B, L) of the first step's tokens.
        """
        if hidden is None:
            if mask is None:
                raise UserError("start: a decoder-only model needs the mask of its first tokens: all ones if unpadded")
            return self._of(CausalGraphs).begin(np.asarray(mask).astype(np.int64))
        return self._of(EncoderDecoderGraphs).begin(hidden, _mask(mask, hidden))

    def step(self, ids: Any, cache: OnnxCache) -> NDArray[np.float32]:
        """Logits (B, L, V) after the next tokens (B, L); the cache advances by L."""
        return self._of(EncoderDecoderGraphs, CausalGraphs).step(self._ids(ids, self.config.vocab_size), cache)

    def _with_attention(self, ids: Ids, best: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        from mlx_transformer.generation.alignment import cross_weights_by  # imported on use, like the translator

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
        """The model's inputs by name, e.g. {"source_ids": (B, L)} or vectors (B, L, D), and the mask (B, L)."""
        source = Sources.of(self.config, "ids", ids=ids, **others).stacked()
        return source, _mask(mask, next(iter(source.values())))

    def _ids(self, ids: Any, vocab_size: int) -> NDArray[np.int64]:
        rows = check_ids(ids, vocab_size, "ids")
        check_equally_long(rows, self.config, "ids")
        return np.stack(rows)


def graphs_of(request: Request, sessions: Mapping[str, Any], **of_cpu: Any) -> Any:
    """One model from the sessions {graph's name: session} of a folder. of_cpu: arguments for target cpu's models."""
    if ENCODER_CPU in sessions:  # imported here, since other targets don't need it
        from export.targets.cpu.runtime import CpuModel

        return CpuModel(request, sessions[ENCODER_CPU], sessions[DECODER_CPU], **of_cpu)
    if STEP_CPU in sessions:
        from export.targets.cpu.texts import DecoderGraphs

        return DecoderGraphs(request, sessions, of_cpu.get("exact", True))
    kinds = {"encoder-decoder": EncoderDecoderGraphs, "decoder": CausalGraphs, "encoder": EncoderGraphs}
    return kinds[request.config.architecture](request, sessions)


def _mask(mask: Any, like: NDArray) -> NDArray[np.int64]:
    """The mask (B, L) as int64, by default all ones, for an input (B, L) or (B, L, D)."""
    shape = like.shape[:2]
    if mask is None:
        return np.ones(shape, np.int64)
    mask = np.asarray(mask).astype(np.int64)
    if mask.shape != shape:
        raise UserError(f"mask: its shape {mask.shape} differs from that of the input, {shape}")
    return mask
