"""Two kinds of pages: with the three small models in this package, and `inside.html` of a site.

`inside.html` follows one word through the exported graphs, with all their inner values as outputs. No node and no
weight is added, so the page shows the graphs' own numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.graph.protos import add_taps, arrays_of, read_model
from export.validate.engines.graph_points import points_of
from export.validate.points import inner_names
from export.web.models import Graph, SiteModel
from export.web.write import Inside
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.parameters import output_weight_name, parameter_shapes
from mlx_transformer.data.built_in import build
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer, checked_tokenizer

from .page import computed_live, layer_outputs, live, packed_weights, page, page_tokenizer

FOLDER = Path(__file__).parent / "models"
TIRED = "The animal didn't cross the street because it was too tired"


def _example(text: str, layer: int, head: int, **find: str) -> dict[str, Any]:
    """A text, and where the page looks first: a telling layer and head (from 1), at the last place of these words."""
    return {"text": text, "at": {"layer": layer - 1, "head": head - 1}, "find": find}


MODELS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "sentences": (
        "translate",
        "An encoder-decoder of 2 + 2 layers, 295,936 numbers, that learned English and German sentences of eight "
        "patterns in minutes. It runs in this page, in float64: type, and everything moves.",
        [
            _example(TIRED, 2, 4, word="·it", step="·es"),
            _example(TIRED.replace("tired", "wide"), 2, 4, word="·it", step="·sie"),
            _example("On the river bank", 2, 1, word="·bank", step="·Ufer"),
            _example("YOUR CAT IS A LOVELY CAT", 2, 4, word="·LOVELY", step="·LIEB"),
            _example("The cat sat on the mat", 2, 2, word="·cat", step="·Katze"),
            _example("The mat sat on the cat", 2, 2, word="·cat", step="·Katze"),
            _example("My fried chicken was very good", 2, 4, word="·fried", step="·gebratenes"),
        ],
    ),
    "sentences-decoder": (
        "continue",
        "A decoder alone, 2 layers, 144,256 numbers: it goes on where the text stops, word by word.",
        [
            _example("YOUR CAT IS A LOVELY", 2, 1, step="·CAT"),
            _example("My fried chicken was very", 2, 4, step="·dry"),
            _example("The animal", 2, 3, step="·slow"),
        ],
    ),
    "sentences-encoder": (
        "fill in",
        "An encoder alone, 2 layers, 144,256 numbers: it sees all words at once and says what belongs at ▢.",
        [
            _example("My ▢ chicken was very good", 1, 3, word="▢"),
            _example("YOUR ▢ IS A LOVELY CAT", 1, 1, word="▢"),
            _example("The cat sat on the ▢", 2, 1, word="▢"),
        ],
    ),
}
"""By folder: the model's task, its description, and example texts with the place to look first."""


def shipped() -> list[dict[str, Any]]:
    """The models in this package, for `page`. Raises UserError if a folder is missing or damaged."""
    return [_opened(FOLDER / name, *entry) for name, entry in MODELS.items()]


@cache
def known_words() -> list[str]:
    """The words of the English sentences that the models learned from."""
    return sorted({word for text in build("sentences:en-de").train.source for word in text.split()})


def _opened(folder: Path, title: str, description: str, examples: list[dict[str, Any]]) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    text = checked_tokenizer(checkpoint)
    tokenizer = None if text is None else page_tokenizer(text)
    if tokenizer is None:
        raise UserError(f"{folder}: has no tokenizer that a page runs; install the package again")
    weights = dict(checkpoint.tensors())
    return live(checkpoint.config, weights, tokenizer, title, description, examples) | {"words": known_words()}


POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
SAID = "The graphs of this site: their inner values, computed here by onnxruntime-web. Type, and everything moves."
FIRST = ("Hello, how are you?", TIRED, "May 3, 2024")
"""Texts to open the page with: for any model, for the models of sentences, for the quickstart's."""
UNIT = re.compile(r"\d|[^\W\d]+|[^\w\s]")
"""A word, a digit or a sign: each a single token in a suitable vocabulary."""


def known_text(tokenizer: Tokenizer) -> str:
    """The text of `FIRST` with the fewest tokens per word."""
    return min(FIRST, key=lambda text: len(tokenizer.source.encode(text)) / len(UNIT.findall(text)))


def inside(models: Sequence[SiteModel], title: str) -> Inside:
    """Return the page on inner values, for the first model of kind "steps".

    Its graphs are copied under other file names, with every point as an output. Raises UserError if there is no such
    model.
    """
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
    """The parameters in the graphs, for the page's own engine, whose numbers are shown beside the graphs'.

    None for models the engine doesn't support, and for lower precisions.
    """
    shapes = parameter_shapes(model.config)
    if not computed_live(model.config, sum(int(np.prod(shape)) for shape in shapes.values())):
        return None
    graphs = [arrays_of(read_model(graph.file), graph.file.parent, shapes) for graph in model.graphs.values()]
    arrays = {name: array for each in graphs for name, array in each.items() if array.dtype == np.float32}
    return arrays if {name: array.shape for name, array in arrays.items()} == shapes else None


def _page(model: SiteModel, title: str) -> str:
    """The page, which runs `inside.js` beside it."""
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
