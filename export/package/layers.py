"""Which layers of an encoder may be int8: what each does to the vectors of a text, and a mix that keeps neighbours.

    each layer in int8, all others in float32 --> share of each text's ten nearest neighbours that stay among them,
    all of them in int8                           and how far a vector of length 1 moves

    a share is asked for --> each matrix alone, on fewer texts: how far it moves vectors
                             matrices go back to float32, first what moves them most for the multiplications that it
                             saves, until on the whole text so many neighbours are kept, and by more than chance

A layer here is one's attention, one's feed-forward net or the table of tokens; its matrices differ (an attention's
values may move vectors ten times as far as its queries). Errors add up nearly as those of chance do, by their squares,
so that each by itself tells what leaving it in float32 gains. Vectors are made as the model's folder says, else as the
mean of the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.interface import MODEL, Request
from export.precision.packed import unpack_on_load
from export.precision.passes import lower
from export.precision.table import Lowering
from export.targets.portable.runtime import EncoderGraphs
from export.targets.table import target_of
from mlx_transformer.core.inputs import Sources
from mlx_transformer.core.int8_scales import layers_of
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.generation.embed import Embedder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.progress import Progress, no_progress
from mlx_transformer.text.tokenizer import Tokenizer

from .plan import Plan
from .quality import NEIGHBOURS, Text, nearest, shared_neighbours
from .weights import fill

MEASURED = 200
"""Most texts on which layers are measured one by one, from all parts of what is given."""
EACH = 4
"""One in so many of them is for the matrices: how far vectors move shows on few, which neighbours stay on many."""
WEIGHT = ".weight"
"""Ends the name of a matrix's parameter."""
BEFORE_HEAD = ("encoder.", "embedding", "source_embedding")
"""The names of layers that vectors depend on begin so."""
SHOWN = 3
"""Layers that a line names, the costliest."""


@dataclass(frozen=True)
class Moved:
    """The change that int8 makes to vectors: the share of each one's ten nearest neighbours that are float32's too, and
    how far those of length 1 move, root mean square."""

    neighbours: float
    distance: float

    def error(self, texts: int) -> float:
        """Return the standard error of the share of neighbours on so many texts."""
        return math.sqrt(self.neighbours * (1 - self.neighbours) / (NEIGHBOURS * texts))


@dataclass(frozen=True)
class Layers:
    """The change that int8 makes in each layer alone, in the order of the network, and in all of them, on some
    texts."""

    text: str
    sentences: int
    each: dict[str, Moved]
    all: Moved

    def to_dict(self) -> dict[str, Any]:
        each = {layer: vars(moved) for layer, moved in self.each.items()}
        return {"text": self.text, "sentences": self.sentences, "all": vars(self.all), "each": each}

    def __str__(self) -> str:
        worst = sorted(self.each, key=lambda layer: -self.each[layer].distance)[:SHOWN]
        named = ", ".join(f"{layer} {self.each[layer].neighbours:.2%}" for layer in worst)
        return (
            f"int8: neighbours kept with one layer in int8, at worst: {named}; with all {self.all.neighbours:.2%};"
            f" {self.sentences} lines of {self.text}"
        )

    def lines(self) -> list[str]:
        """Return them as a table for the model card."""
        rows = [*self.each.items(), ("all of them", self.all)]
        return [
            f"Neighbours kept with one layer in int8 and all others in float32, and how far a vector of length 1 moves,"
            f" on {self.sentences} lines of {self.text}:",
            "",
            "| layer in int8 | ten nearest neighbours kept | moved |",
            "|---|---|---|",
            *(f"| `{layer}` | {moved.neighbours:.2%} | {moved.distance:.4f} |" for layer, moved in rows),
        ]


def measured(
    plan: Plan,
    least: float | None,
    text: Text | None,
    log: Callable[[str], None] = lambda _: None,
    watch: Progress = no_progress,
) -> tuple[Plan, Layers | None]:
    """Return what each layer costs that the plan has in int8, and the plan with those matrices left in float32 that
    `least`, a share of neighbours, asks for. None where there is no int8, no encoder alone or no text. `log` is called
    with a line on either, `watch` with the share that is done. `UserError` where no layer can be int8."""
    if "int8" not in plan.precisions or plan.config.architecture != "encoder" or text is None:
        return plan, None
    ours = [layer for layer in layers_of(quantizable_shapes(plan.config)) if layer not in plan.int8_scales.float32]
    ours = [layer for layer in ours if layer.startswith(BEFORE_HEAD)]
    lines = text.source[:: math.ceil(len(text.source) / MEASURED)]
    matrices = [] if least is None else matrices_of(plan, ours)
    steps = len(ours) + 2 + (0 if least is None else len(matrices) + 1 + len(matrices).bit_length())

    def done(finished: int) -> None:
        watch(finished / steps, "int8 layers")

    done(0)
    encoders = Encoders(plan, lines, ours)
    *alone, together = encoders.moved([*_each_alone(ours), []], done)
    layers = Layers(text.origin, len(lines), dict(zip(ours, alone, strict=True)), together)
    log(str(layers))
    if least is None:
        return plan, layers
    order = costliest(plan, lines[::EACH], matrices, lambda finished: done(len(ours) + 2 + finished))
    if len(lines) < len(text.source):
        encoders = Encoders(plan, text.source, ours)
    left, moved = fewest(encoders, order, least, lambda tried: done(len(ours) + len(matrices) + 3 + tried))
    chosen = replace(plan, int8_scales=plan.int8_scales.leaving(left, plan.config))
    names = ", ".join(chosen.int8_scales.float32) if left else "no layer"
    log(f"int8: float32 stays in {names}: {moved.neighbours:.2%} of the ten nearest neighbours are kept")
    return chosen, layers


def matrices_of(plan: Plan, layers: Iterable[str]) -> list[str]:
    """Return the matrices of these layers that the plan has in int8."""
    named = layers_of(quantizable_shapes(plan.config))
    return [m.removesuffix(WEIGHT) for layer in layers for m in named[layer] if not plan.int8_scales.of(m).float32]


def costliest(
    plan: Plan, texts: Sequence[str], matrices: Sequence[str], done: Callable[[int], None] = lambda finished: None
) -> list[str]:
    """Return the matrices, that first which moves the vectors of these texts most for the numbers that its integers
    save."""
    shapes = quantizable_shapes(plan.config)
    moved = Encoders(plan, texts, matrices).moved(_each_alone(matrices), done)
    cost = {m: each.distance**2 / math.prod(shapes[m + WEIGHT]) for m, each in zip(matrices, moved, strict=True)}
    return sorted(matrices, key=lambda matrix: -cost[matrix])


def _each_alone(names: Sequence[str]) -> list[list[str]]:
    """Return for each of them all others."""
    return [[other for other in names if other != name] for name in names]


def fewest(
    encoders: Encoders, order: Sequence[str], least: float, done: Callable[[int], None] = lambda tried: None
) -> tuple[list[str], Moved]:
    """Return the fewest of these, the first ones of the order, with which in float32 so many neighbours are kept, and a
    standard error more, so that other texts of the kind keep as many."""
    too_few, enough, best, tried = -1, len(order), None, 0
    while enough - too_few > 1:
        done(tried := tried + 1)
        count = (too_few + enough) // 2
        (moved,) = encoders.moved([order[:count]])
        if moved.neighbours - moved.error(len(encoders.texts)) >= least:
            enough, best = count, moved
        else:
            too_few = count
    if best is None:
        raise UserError(
            "{least_neighbours} {}: with any layer in int8 fewer are kept: take float16, or a smaller share",
            f"{least:g}",
        )
    return list(order[:enough]), best


class Encoders:
    """A plan's encoder in int8, with some of these layers left in float32; and what it makes of texts in float32."""

    def __init__(self, plan: Plan, texts: Sequence[str], layers: Sequence[str]):
        self.plan, self.texts, self.tokenizer = plan, texts, Tokenizer(str(plan.tokenizer))
        (self.exact,) = self._vectors([layers])
        self.nearest = nearest(self.exact)

    def moved(
        self, mixes: Sequence[Sequence[str]], done: Callable[[int], None] = lambda finished: None
    ) -> Iterator[Moved]:
        """Yield what each mix does, by the layers that it leaves in float32."""
        for finished, vectors in enumerate(self._vectors(mixes), start=1):
            done(finished + 1)
            distance = np.sqrt(np.square(vectors - self.exact).sum(axis=1).mean())
            yield Moved(shared_neighbours(self.nearest, nearest(vectors)), float(distance))

    def _vectors(self, mixes: Sequence[Sequence[str]]) -> Iterator[NDArray[np.float64]]:
        """Yield the vectors of all texts, of length 1, by each mix: all of them read one data file."""
        from export.runtime.sessions import open_session  # writing a package needs no ONNX Runtime

        plan, request = self.plan, Request(config=self.plan.config)
        rows: list[list[int]] = []  # the same for each mix
        with TemporaryDirectory() as name:
            models = [self._graph(request, mix) for mix in mixes]
            fill(models, plan.checkpoint, Path(name, f"{MODEL}.onnx_data"), 1024)
            for i, model in enumerate(models):
                file = Path(name, f"{i}.onnx")
                file.write_bytes(ir.to_proto(model).SerializeToString())
                graphs = EncoderGraphs(request, {MODEL: open_session(file)})

                def encode(ids: NDArray, mask: NDArray, graphs: EncoderGraphs = graphs) -> NDArray:
                    return graphs.encode(Sources.of(plan.config, ids=ids).stacked(), mask)

                how: dict[str, Any] = {} if plan.embedding is not None else {"pooling": "mean"}
                made = Embedder(plan.config, self.tokenizer, plan.embedding, encode, str(plan.checkpoint.folder), **how)
                rows = rows or made.rows(self.texts)
                vectors = made.vectors(rows).astype(np.float64)
                yield vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float64).tiny)

    def _graph(self, request: Request, left: Sequence[str]) -> ir.Model:
        model = target_of("portable").build(MODEL, request)
        scales = self.plan.int8_scales.leaving(left, self.plan.config)
        lower(model, "int8", Lowering(), scales=scales)
        unpack_on_load(model, self.plan.checkpoint)
        return model
