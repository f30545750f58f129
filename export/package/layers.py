"""Which layers of an encoder may be int8: measure the effect of each on text vectors, and leave the worst in float32.

    a layer in int8, the others in float32    -->  share of each text's ten nearest neighbours kept, and how far
    all layers in int8                             a vector of length 1 moves

    with `least_neighbours`: a matrix at a time in int8, on fewer texts   --> how far it moves vectors
                             return matrices to float32, first those that move vectors most for their size,
                             until the whole text keeps enough neighbours, with a margin of a standard error

A "layer" here is an attention, a feed-forward net or the token table. Its matrices differ: an attention's values may
move vectors ten times as far as its queries. The errors of matrices add up nearly like independent noise, by their
squares, so measuring each matrix on its own shows the gain of float32 there. Vectors are pooled as the model's folder
says, otherwise as the mean of the last layer.
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
"""Most texts for measuring single layers, spread evenly over the given text."""
EACH = 4
"""Matrices are measured on every fourth of those texts: few texts show how far vectors move, but neighbours need
many."""
WEIGHT = ".weight"
"""Ending of a matrix's parameter name."""
BEFORE_HEAD = ("encoder.", "embedding", "source_embedding")
"""Name prefixes of the layers below the head, which vectors depend on."""
SHOWN = 3
"""Layers named in the log line, worst first."""


@dataclass(frozen=True)
class Moved:
    """The effect of int8 on vectors.

    neighbours: share of each text's ten nearest neighbours kept from float32. distance: root mean square of how far
    vectors of length 1 move.
    """

    neighbours: float
    distance: float

    def error(self, texts: int) -> float:
        """Standard error of `neighbours` on `texts` texts."""
        return math.sqrt(self.neighbours * (1 - self.neighbours) / (NEIGHBOURS * texts))


@dataclass(frozen=True)
class Layers:
    """The effect of int8 on some texts: of each layer on its own, in the network's order, and of all layers
    together."""

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
        """A Markdown table for the model card."""
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
    """Measure each int8 layer of the plan, and leave matrices in float32 until the share of neighbours `least` is
    reached.

    Returns (plan, measurements); (the same plan, None) without int8, without text, or if the model isn't encoder-only.
    Without `least` the plan stays as it is. `log` gets a line per result, `watch` the share done. Raises UserError if
    too few neighbours are kept with any matrix in int8.
    """
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
    """Names of the int8 matrices in these layers."""
    named = layers_of(quantizable_shapes(plan.config))
    return [m.removesuffix(WEIGHT) for layer in layers for m in named[layer] if not plan.int8_scales.of(m).float32]


def costliest(
    plan: Plan, texts: Sequence[str], matrices: Sequence[str], done: Callable[[int], None] = lambda finished: None
) -> list[str]:
    """Sort matrices by the vectors' squared movement per int8 weight, worst first."""
    shapes = quantizable_shapes(plan.config)
    moved = Encoders(plan, texts, matrices).moved(_each_alone(matrices), done)
    cost = {m: each.distance**2 / math.prod(shapes[m + WEIGHT]) for m, each in zip(matrices, moved, strict=True)}
    return sorted(matrices, key=lambda matrix: -cost[matrix])


def _each_alone(names: Sequence[str]) -> list[list[str]]:
    """For each name, all the other names: the list to leave in float32."""
    return [[other for other in names if other != name] for name in names]


def fewest(
    encoders: Encoders, order: Sequence[str], least: float, done: Callable[[int], None] = lambda tried: None
) -> tuple[list[str], Moved]:
    """Find the shortest prefix of `order` to leave in float32, by bisection; return it and its measurement.

    Enough means: a share of at least `least` is kept, plus a standard error, so that other texts of the same kind keep
    as many. Raises UserError if only all of them in float32 would be enough.
    """
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
    """A plan's encoder in int8 with a choice of layers in float32, and the float32 vectors of `texts` to compare
    with."""

    def __init__(self, plan: Plan, texts: Sequence[str], layers: Sequence[str]):
        self.plan, self.texts, self.tokenizer = plan, texts, Tokenizer(str(plan.tokenizer))
        (self.exact,) = self._vectors([layers])
        self.nearest = nearest(self.exact)

    def moved(
        self, mixes: Sequence[Sequence[str]], done: Callable[[int], None] = lambda finished: None
    ) -> Iterator[Moved]:
        """Yield the effect of each mix. A mix lists the layers or matrices in float32."""
        for finished, vectors in enumerate(self._vectors(mixes), start=1):
            done(finished + 1)
            distance = np.sqrt(np.square(vectors - self.exact).sum(axis=1).mean())
            yield Moved(shared_neighbours(self.nearest, nearest(vectors)), float(distance))

    def _vectors(self, mixes: Sequence[Sequence[str]]) -> Iterator[NDArray[np.float64]]:
        """Yield the vectors of all texts (N, W), of length 1, for each mix. All mixes read the same data file."""
        from export.runtime.sessions import open_session  # lazy: writing a package needs no ONNX Runtime

        plan, request = self.plan, Request(config=self.plan.config)
        rows: list[list[int]] = []  # token ids, the same for each mix
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
