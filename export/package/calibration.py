"""Scales of int8 that are fixed by a text: how large the activations get that come to each product, in float32.

    text --> rows --> greedy outputs --> float32 graphs, teacher-forced --> max|x| of each token at each product
                                                                             |
    a = steps / (a percentile of them over all tokens) <---------------------+

A decoder over an encoder reads its own translations, which is what it will read; a model alone reads the text. Behind a
Relu there are 255 steps from zero up, elsewhere 127 on either side; in Marian's files 127 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.graph.edit import Nodes
from export.interface import DECODER_FIRST, DECODER_NEXT, ENCODER, MODEL, Request
from export.precision.activations import ROUNDED
from export.precision.mlx_integers import unpack_on_load
from export.precision.products import least_of, linears
from export.precision.rounding import one_multiplier
from export.targets.portable.runtime import CausalGraphs, EncoderDecoderGraphs, EncoderGraphs
from export.targets.session import Session
from export.targets.table import target_of
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources
from mlx_transformer.core.int8_scales import (
    SIGNED,
    SYMMETRIC,
    UNSIGNED,
    Int8Scales,
    ProductScales,
    multiplied_names,
)
from mlx_transformer.core.parameters import quantizable_shapes

from .weights import fill

GRAPHS = {"encoder-decoder": (ENCODER, DECODER_FIRST), "decoder": (MODEL,), "encoder": (MODEL,)}
"""Those that read a text in one pass, by architecture."""
LARGEST = "/largest"
"""Ends the name of an output: max|x| of each token, of what is multiplied with the parameter of that name."""


@dataclass
class Site:
    """The inputs that came to one product: whether it is never negative, and max|x| of each token."""

    positive: bool
    largest: list[NDArray[np.float32]] = field(default_factory=list)

    def scales(self, percentile: float, symmetric: bool = False) -> ProductScales:
        """Return the scales that cut what is beyond this percentile of the tokens; none where nothing came."""
        limit = np.percentile(np.concatenate(self.largest), percentile) if self.largest else 0.0
        steps, rounded = (UNSIGNED, UNSIGNED) if self.positive else (SIGNED, ROUNDED)
        if symmetric:
            steps, rounded = SYMMETRIC, SYMMETRIC
        if not np.finfo(np.float32).tiny * rounded < limit < np.inf:
            return ProductScales()
        return ProductScales(np.float32(rounded / limit), steps)


def observe(
    checkpoint: Checkpoint, folder: Path, rows: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> dict[str, Site]:
    """Return what comes to each product, by the name of its parameter, while the model reads rows of ids and, of an
    encoder-decoder, writes `outputs`. `folder`: empty, for the graphs.

    Each row is read by itself, so that no padding is seen.
    """
    config, sites = checkpoint.config, dict[str, Site]()
    request = Request(config=config)
    sessions = {name: _session(checkpoint, request, name, folder, sites) for name in GRAPHS[config.architecture]}
    if config.architecture == "encoder-decoder":
        sessions[DECODER_NEXT] = sessions[DECODER_FIRST]  # no later step is taken
        translator = EncoderDecoderGraphs(request, sessions)
        for row, output in zip(rows, outputs, strict=True):
            source, mask = Sources.of(config, ids=[row]).padded()
            target = np.array([[config.bos_id, *output][: config.max_positions]], np.int64)
            translator.decode(target, translator.encode(source, mask), mask)
    else:
        alone = (CausalGraphs if config.architecture == "decoder" else EncoderGraphs)(request, sessions)
        for row in rows:
            alone.logits(*Sources.of(config, ids=[row]).padded())
    return sites


def scales_of(
    sites: Mapping[str, Site],
    percentile: float,
    config: TransformerConfig,
    before: Int8Scales,
    origin: Mapping[str, str | int | float],
    symmetric: bool = False,
) -> Int8Scales:
    """Return the scales that these sites ask for. `before`: whose multipliers of weights, and what is float32, stay.
    `symmetric`: all have 127 steps on either side."""
    scales = {name: site.scales(percentile, symmetric) for name, site in sites.items()}
    products = {
        name: replace(scales.get(name, ProductScales()), weight=before.of(name).weight)
        for name in quantizable_shapes(config)
    }
    return Int8Scales(products, {**origin, "percentile": percentile}).leaving(before.float32, config)


def whole_matrices(checkpoint: Checkpoint) -> Int8Scales:
    """Return multipliers of matrices whose rows can share a scale: the product of a single row with such a one takes
    two thirds of the time."""
    names = sorted(multiplied_names(checkpoint.config))
    return Int8Scales({name: ProductScales(weight=one_multiplier(checkpoint.tensor(name))) for name in names})


def _session(checkpoint: Checkpoint, request: Request, name: str, folder: Path, sites: dict[str, Site]) -> Session:
    """Open a float32 graph that shows what comes to its products."""
    from export.runtime.sessions import open_session  # writing a package needs no ONNX Runtime

    model = target_of("portable").build(name, request)
    for linear in linears(model):
        parameter = str(linear.weight.name)
        if parameter not in sites:
            sites[parameter] = Site(least_of(linear.x) == 0)
            _show(model, linear.node, linear.x, parameter + LARGEST)
    unpack_on_load(model, checkpoint)
    fill([model], checkpoint, folder / f"{name}.onnx_data", 1024)
    path = folder / f"{name}.onnx"
    path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
    return _Watched(open_session(path), sites)


def _show(model: ir.Model, node: ir.Node, x: ir.Value, name: str) -> None:
    add = Nodes(model, node, output=LARGEST)
    largest = add("ReduceMax", add("Abs", x), add.constant([-1]), keepdims=0)
    add.before()
    largest.name, largest.type, largest.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([None, None])
    model.graph.outputs.append(largest)


class _Watched:
    """A session, used like one of the graph that shows nothing: each run adds to the sites."""

    def __init__(self, session: Session, sites: Mapping[str, Site]):
        self.session, self.sites = session, sites
        self.maxima = [entry.name for entry in session.get_outputs() if entry.name.endswith(LARGEST)]

    def get_inputs(self) -> Sequence[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> Sequence[Any]:
        return [entry for entry in self.session.get_outputs() if entry.name not in self.maxima]

    def run(self, output_names: Iterable[str], input_feed: Any, /) -> Any:
        names = list(output_names)
        values = self.session.run([*names, *self.maxima], input_feed)
        for name, value in zip(self.maxima, values[len(names) :], strict=True):
            self.sites[name.removesuffix(LARGEST)].largest.append(value.ravel())
        return values[: len(names)]
