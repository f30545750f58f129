"""The graphs that export builds of a checkpoint, with the choices that a package records: its target, precision,
activations, scales, layer of attention. Nothing is written, and weights have their values when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from export.package.recorded import recorded_plan
from export.package.weights import promise
from export.package.write import package_graphs
from export.search.record import recorded_plan as recorded_file
from export.search.record import settings_beside
from export.search.write import one_file_graph, place_constants
from export.targets.table import TARGETS
from export.validate.engines.onnx_engine import OnnxEngine, OnnxFiles
from export.validate.engines.search_engine import SearchEngine
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.system.errors import shortened
from mlx_transformer.system.files import read_json

from .package_files import UNREADABLE
from .same_graph import Comparison


def same_graphs(engine: OnnxFiles) -> tuple[int, list[str]]:
    """Compare an engine's graphs with those that export builds: (how many nodes these have, what differs in words)."""
    nodes, problems = 0, list[str]()
    try:
        graphs = list(expected_graphs(engine))
    except UNREADABLE as error:
        return 0, [f"its record: no graph can be built by it ({shortened(str(error))})"]
    for name, expected in graphs:
        comparison = Comparison(expected, ir.load(engine.files[name]))
        nodes += comparison.nodes
        problems += [f"{name}: {problem}" for problem in comparison.problems]
    return nodes, problems


def expected_graphs(engine: OnnxFiles) -> Iterator[tuple[str, ir.Model]]:
    """Yield (name, the graph that export builds) of an engine's files; nothing where no checkpoint is known, or of
    files that somebody else exported."""
    if engine.checkpoint is None:
        return
    if isinstance(engine, SearchEngine):
        yield "search", _closest(engine)
    elif isinstance(engine, OnnxEngine):
        yield from _of_folder(engine)


def _of_folder(engine: OnnxEngine) -> Iterator[tuple[str, ir.Model]]:
    folder = engine.folder
    place = next((each for each in (folder.path, folder.place) if (each / ONNX_CONFIG).is_file()), None)
    if engine.checkpoint is None or place is None:
        return
    plan = recorded_plan(engine.checkpoint, folder.path, read_json(place / ONNX_CONFIG))
    if folder.activations is not None:
        plan = replace(plan, activations=folder.activations)
    for graphs in package_graphs(plan, folder.precision).values():
        for name, model in graphs.items():
            if name in engine.files:
                promise(model, plan.checkpoint)
                yield name, model


def _closest(engine: SearchEngine) -> ir.Model:
    """Return the graph of one file as that target writes it that comes nearest: the file doesn't say which it was."""
    assert engine.checkpoint is not None
    path, text = engine.files["search"], engine.model.takes_text
    got, best, fewest = ir.load(path), None, 0
    plan = recorded_file(engine.checkpoint, engine.model.metadata, path)
    generation, _ = settings_beside(plan, path.stem, text)
    searching = [target for target in TARGETS.values() if target.search]
    for target in searching:
        model = one_file_graph(replace(plan, target=target), generation, text)
        promise(model, plan.checkpoint)
        place_constants(model)
        differing = len(Comparison(model, got).problems)
        if best is None or differing < fewest:
            best, fewest = model, differing
        if not fewest:
            break
    assert best is not None
    return best
