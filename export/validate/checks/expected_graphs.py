"""The graphs that export builds of a checkpoint, with the choices that a package records: its target, precision,
activations, scales, layer of attention. Nothing is written, and weights have their values when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from export.package.plan import Plan
from export.package.weights import promise
from export.package.write import package_graphs
from export.precision.int8 import BY_ROW
from export.precision.table import DEFAULT_ACTIVATIONS
from export.request import Request
from export.runtime.folder import OnnxFolder
from export.search.metadata import ACTIVATIONS, ATTENTION, GENERATION, PRECISION, SOURCE, int8_scales_of
from export.search.write import one_file_graph, place_constants
from export.targets.table import TARGETS, Target, target_of
from export.validate.engines.onnx_engine import OnnxEngine, OnnxFiles
from export.validate.engines.search_engine import SearchEngine
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.core.int8_scales import Int8Scales
from mlx_transformer.core.text_embedding import read_embedding
from mlx_transformer.generation.settings import SHORTLIST, read_settings
from mlx_transformer.system.files import parse_json, read_json

from .same_graph import Comparison

NOT_COMPARED = (SOURCE,)
"""Of what a file says of itself: the digest of a checkpoint's weights, which are compared themselves."""


def same_graphs(engine: OnnxFiles) -> tuple[int, list[str]]:
    """Compare an engine's graphs with those that export builds: (how many nodes these have, what differs in words)."""
    nodes, problems = 0, list[str]()
    for name, expected in expected_graphs(engine):
        comparison = Comparison(expected, ir.load(engine.files[name]), NOT_COMPARED)
        nodes += comparison.nodes
        problems += [f"{name}: {problem}" for problem in comparison.problems]
    return nodes, problems


def expected_graphs(engine: OnnxFiles) -> Iterator[tuple[str, ir.Model]]:
    """Yield (name, the graph that export builds) of an engine's files; nothing where no checkpoint is known, or of
    files that somebody else exported."""
    if engine.checkpoint is None:
        return
    if isinstance(engine, SearchEngine):
        ((name, path),) = engine.files.items()
        about = engine.checkpoint, path, engine.model.metadata, engine.model.takes_text
        got, closest, fewest = ir.load(path), None, -1
        for expected in one_file_graphs(*about):
            differing = len(Comparison(expected, got, NOT_COMPARED).problems)
            if closest is None or differing < fewest:
                closest, fewest = expected, differing
            if not fewest:
                break
        assert closest is not None
        yield name, closest
    elif isinstance(engine, OnnxEngine):
        graphs = folder_graphs(engine.checkpoint, engine.folder, engine.int8_scales)
        yield from ((name, graph) for name, graph in graphs.items() if name in engine.files)


def folder_graphs(checkpoint: Checkpoint, folder: OnnxFolder, scales: Int8Scales) -> dict[str, ir.Model]:
    """Build the graphs of a folder by name; none where somebody else exported it."""
    file = next((f for f in (folder.path / ONNX_CONFIG, folder.place / ONNX_CONFIG) if f.is_file()), None)
    if file is None:
        return {}
    values = read_json(file)
    target, config, recorded = target_of(values.get("target", "portable")), checkpoint.config, folder.request
    embedding = read_embedding(checkpoint.folder, config.d_model)
    if embedding is not None:
        embedding = embedding.cut(recorded.dimensions, config.d_model)
    request = Request(
        config=config,
        shape=target.shape_of(values.get("fixed_shape"), config),
        attention_layer=recorded.attention_layer,
        inputs_embeds=recorded.inputs_embeds,
        by_token=target.by_token and config.architecture == "encoder",
        embedding=target.embedding_of(config, embedding),
        dimensions=recorded.dimensions,
    )
    activations = folder.activations or DEFAULT_ACTIVATIONS
    by_owner = package_graphs(checkpoint, target, request, folder.precision, activations, scales)
    models = {name: model for graphs in by_owner.values() for name, model in graphs.items()}
    for model in models.values():
        promise(model, checkpoint)
    return models


def one_file_graphs(checkpoint: Checkpoint, path: Path, metadata: dict[str, str], text: bool) -> Iterator[ir.Model]:
    """Yield the graph of one file as each target writes it: the file doesn't say which one that was."""
    for target in (target for target in TARGETS.values() if target.search):
        model = one_file_graph(_plan(checkpoint, target, path, metadata), text, "")
        promise(model, checkpoint)
        place_constants(model)
        yield model


def _plan(checkpoint: Checkpoint, target: Target, path: Path, metadata: dict[str, str]) -> Plan:
    config, embedding = checkpoint.config, read_embedding(checkpoint.folder, checkpoint.config.d_model)
    generation: dict[str, Any] = dict(read_settings(checkpoint.folder, config))
    generation.pop(SHORTLIST, None)
    if GENERATION in metadata:  # where the file's shortlist lies is its own choice
        own = parse_json(metadata[GENERATION], f"{path}: damaged settings", "write it again with export --search")
        generation |= {SHORTLIST: own[SHORTLIST]} if isinstance(own, dict) and SHORTLIST in own else {}
    return Plan(
        checkpoint=checkpoint,
        tokenizer=checkpoint.tokenizer_json(),
        target=target,
        precisions=(metadata.get(PRECISION, "float32"),),
        activations=metadata.get(ACTIVATIONS, DEFAULT_ACTIVATIONS),
        int8_scales=int8_scales_of(metadata, config, path) or BY_ROW,
        fixed_shape=None,
        request=Request(
            config=config,
            attention_layer=int(metadata[ATTENTION]) if ATTENTION in metadata else None,
            embedding=target.embedding_of(config, embedding),
        ),
        embedding=embedding,
        generation=generation,
        named={},
    )
