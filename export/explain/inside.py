"""`inside.html` of a site: one word through the exported graphs, all of whose inner values are outputs there. No node
and no weight is added, so that what is shown is what the graphs compute."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.graph.protos import add_taps, arrays_of, read_model
from export.validate.engines.graph_points import points_of
from export.validate.points import inner_names
from export.web.models import Graph, SiteModel
from export.web.write import Inside
from mlx_transformer.core.parameters import output_weight_name, parameter_shapes
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.system.errors import UserError

from .page import page
from .payload import computed_live, layer_outputs, packed_weights
from .shipped import TIRED

POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
SAID = "The graphs of this site: their inner values, computed here by onnxruntime-web. Type, and everything moves."
FIRST = ("Hello, how are you?", TIRED, "May 3, 2024")
"""What the page may open with: of any text, of the models of sentences, of the quickstart's."""
UNIT = re.compile(r"\d|[^\W\d]+|[^\w\s]")
"""A word, a digit or a sign, each a token in a vocabulary that knows it."""


def known_text(tokenizer: Tokenizer) -> str:
    """Return the one of `FIRST` that a vocabulary cuts least."""
    return min(FIRST, key=lambda text: len(tokenizer.source.encode(text)) / len(UNIT.findall(text)))


def inside(models: Sequence[SiteModel], title: str) -> Inside:
    """Return the page, and the first model that is searched step by step with every point of its graphs as an output
    under another file name. `UserError` if there is none."""
    model = next((model for model in models if model.kind == "steps"), None)
    if model is None:
        raise UserError(
            "--taps needs a folder of export --target web: a file with the search shows nothing from within"
        )
    graphs: dict[str, Graph] = {}
    taps = {}
    for name, graph in model.graphs.items():
        proto = read_model(graph.file)
        taps[name] = points_of(proto.graph, inner_names(model.config))
        contents = add_taps(proto, list(taps[name].values())).SerializeToString(deterministic=True)
        graphs[name] = replace(graph, file=Path(f"{graph.file.stem}-inside.onnx"), contents=contents)
        taps[name] |= layer_outputs(model.config, taps[name])
    return Inside(_page(model, title), replace(model, graphs=graphs), taps)


def _weights(model: SiteModel) -> dict[str, NDArray] | None:
    """Return the parameters that the graphs hold in float32, for the page's own engine, whose numbers are shown beside
    theirs. None for models that it doesn't know, and for lower precisions."""
    shapes = parameter_shapes(model.config)
    if not computed_live(model.config, sum(int(np.prod(shape)) for shape in shapes.values())):
        return None
    graphs = [arrays_of(read_model(graph.file), graph.file.parent, shapes) for graph in model.graphs.values()]
    arrays = {name: array for each in graphs for name, array in each.items() if array.dtype == np.float32}
    return arrays if {name: array.shape for name, array in arrays.items()} == shapes else None


def _page(model: SiteModel, title: str) -> str:
    """Return the page, which runs `inside.js` beside it."""
    values: dict[str, Any] = {
        "title": title,
        "said": SAID,
        "module": "./inside.js",
        "examples": [{"text": known_text(Tokenizer(model.tokenizer, model.name)), "at": {}}],
        "config": model.config.to_dict(),
        "classifier": output_weight_name(model.config),
        "parameters": {},
    }
    weights = _weights(model)
    if weights is not None:
        values["beside"] = packed_weights(weights, exact=True)
    return page([values], policy=POLICY)
