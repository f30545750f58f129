"""The base of engines that run an exported folder's graphs: full passes, cached passes, taps, search.

Subclasses define how to open a graph.

Taps come from copies of the exported graphs in memory: the same nodes and data files, with inner values as further
outputs. So a mistake in a file shows in its taps. Further outputs stop an optimiser from fusing the operators around
them, so the files are run untouched as well.

Shapes: B batch, L tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.graph.protos import add_taps
from export.interface import CROSS_ATTENTION, CROSS_DECODERS, DECODER_FIRST, DECODER_MERGED, ENCODER
from export.package.quality import recorded
from export.precision.int8 import BY_ROW
from export.precision.table import PRECISIONS
from export.runtime.folder import OnnxFolder, graph_file, open_folder
from export.runtime.transformer import graphs_of
from export.targets.portable.runtime import CausalGraphs, EncoderDecoderGraphs, EncoderGraphs
from export.targets.session import Session
from export.validate.cases import Case
from export.validate.findings import PLAIN
from export.validate.points import tap_names
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.core.heads import VOCABULARY, Kind
from mlx_transformer.core.int8_scales import read_int8_scales
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system.errors import UserError

from .graph_points import points_of, quantisers, show_integers, show_weights
from .protocol import Capabilities
from .stored import OnnxFiles

if TYPE_CHECKING:
    from export.search.runtime import SearchModel


Array = NDArray
Graphs = EncoderDecoderGraphs | CausalGraphs | EncoderGraphs

# The checkpoint and the ONNX folder must agree in these. Any other difference shows in the comparison.
SHAPES = "architecture vocab_size source_vocab_size d_model encoder_layers decoder_layers".split()


class TappedSession:
    """A session of a tapped copy, with the untapped graph's interface. It passes each run's taps to `observe`."""

    def __init__(self, session: Any, names: Sequence[str], observe: Callable[[str, Array], None]):
        """names: of all taps. `logits` are an output anyway, observed when a run asks for them."""
        self.session, self.observe, self.names = session, observe, set(names)
        extra = {entry.name for entry in session.get_outputs()} & self.names - {"logits"}
        self.taps = [name for name in names if name in extra]

    def get_inputs(self) -> Sequence[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> list[Any]:
        return [entry for entry in self.session.get_outputs() if entry.name not in self.taps]

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Array], *options: Any) -> list[Any]:
        requested = list(output_names or [entry.name for entry in self.get_outputs()])
        names = [*requested, *self.taps]
        values = self.session.run(names, input_feed, *options)
        for name, value in zip(names, values, strict=True):
            if name in self.names:
                self.observe(name, value)
        return values[: len(requested)]

    def io_binding(self) -> Any:
        binding = self.session.io_binding()
        self._bind(binding)
        return binding

    def _bind(self, binding: Any) -> None:
        for name in self.taps:
            binding.bind_output(name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self._bind(binding)  # again: outputs may be longer than in the previous run
        self.session.run_with_iobinding(binding, options)
        for name, value in zip(self.taps, binding.get_outputs(), strict=False):
            self.observe(name, value.numpy().copy())  # the next run writes to the same memory


class OnnxEngine(OnnxFiles):
    """An engine with an exported folder's graphs."""

    def __init__(self, checkpoint: Checkpoint | None, onnx_folder: Path, precision: str | None = None):
        """checkpoint: the folder was exported from it; None if nothing is compared with a checkpoint."""
        self.checkpoint, self.folder = checkpoint, open_folder(onnx_folder, precision)
        self.precision, self.activations = self.folder.precision, self.folder.activations
        self.config, self._round_trips = self.folder.config, {}
        if self.precision == "int8":
            self.int8_scales = read_int8_scales(self.folder.path, self.config) or BY_ROW
        if (self.folder.path / ONNX_CONFIG).is_file():
            mine = (each for each in recorded(self.folder.path) if each.precision == self.precision and each.neighbours)
            self.retrieval = next(map(str, mine), "")
        if checkpoint is not None:
            check_same_model(self.folder, checkpoint)
        self.capabilities = Capabilities(
            files=_all_graphs(self.folder),
            isolates="onnx",
            reads_vectors=self.folder.request.inputs_embeds,
            attention_layer=self.folder.request.attention_layer,
            gives_vectors=() if (made := self.folder.request.embedding) is None else made.kinds,
            dimensions=self.folder.request.dimensions,
        )
        self.sessions: dict[str, Session] = {name: self.open(path) for name, path in self.files.items()}
        self._tapped: dict[str, TappedSession] = {}
        self._tapped_sessions: dict[tuple[str, ...], TappedSession] = {}
        self._observed: dict[str, list[Array]] = {}
        self._encoded: tuple[Case, Array] | None = None

    def logits(self, case: Case) -> Array:
        return graph_logits(self._model(), case, self._memory(case))

    def taps(self, case: Case) -> dict[str, Array]:
        return self._taps_of(lambda: graph_logits(self._model(self._tapping(*self._full_pass())), case))

    def points(self, case: Case, names: Sequence[str]) -> dict[str, Array]:
        sessions = {graph: self._showing(graph, names) for graph in self._full_pass() or self.files}
        return self._taps_of(lambda: graph_logits(self._model(sessions), case))

    def taps_with_integers(self, case: Case, searching: bool = False) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return (taps, integers (B,L,D) read by int8 products, by parameter) from the same run.

        In another run an activation next to a half may be rounded to the other side. searching: return the integers in
        the passes of a search, without taps, so that operators are fused as in a search.
        """
        sessions, taps = {}, [] if searching else tap_names(self.config)
        way = self._ways().get("cached", []) if searching else []
        for graph in way or self._full_pass() or self.files:
            read = self._integers_of(graph)
            names = list(dict.fromkeys(read.values()))
            if (key := (graph, *names, *taps)) not in self._tapped_sessions:
                model = onnx.load(self.files[graph], load_external_data=False)
                show_integers(model.graph)
                copy = add_taps(model, [*names, *taps])
                of = {value: [name for name, each in read.items() if each == value] for value in names}
                observe = partial(self._observe_as, of)
                self._tapped_sessions[key] = TappedSession(self.open(self.files[graph], copy), [*names, *taps], observe)
            sessions[graph] = self._tapped_sessions[key]
        values = self._values_of(sessions, case, way)
        table = parameter_shapes(self.config)
        return {n: x for n, x in values.items() if n in taps}, {n: x for n, x in values.items() if n in table}

    def _integers_of(self, graph: str) -> dict[str, str]:
        """Return {parameter: name of the integers its product reads} for a graph."""
        model = onnx.load(self.files[graph], load_external_data=False)
        return dict(quantisers(model.graph, self.files[graph].parent))

    def _observe_as(self, of: Mapping[str, Sequence[str]], value: str, array: Array) -> None:
        """Observe integers by their parameters' names, as another graph may have a value of the same name."""
        for name in of.get(value, [value]):
            self._observe(name, array)

    def _values_of(self, sessions: Mapping[str, TappedSession], case: Case, way: Sequence[str]) -> dict[str, Array]:
        """Return the values observed in a full pass, or in the cached passes with the graphs `way`."""
        model = self._model(sessions, way or None)
        if not way:
            return self._taps_of(lambda: graph_logits(model, case))
        encode = model.encode if isinstance(model, EncoderDecoderGraphs) else lambda *_: None
        return self._taps_of(lambda: cached(model, case, encode(case.inputs, case.source_mask)))

    @contextmanager
    def searching(self) -> Iterator[Any]:
        yield self._model()

    def cached_logits(self, case: Case) -> dict[str, Array]:
        return {path: cached(self._model({}, only), case, self._memory(case)) for path, only in self._ways().items()}

    def cached_taps(self, case: Case) -> dict[str, dict[str, Array]]:
        """See `Engine`. The encoder has no cache and isn't tapped again."""
        taps = {}
        for path, only in self._ways().items():
            model = self._model(self._tapping(*(name for name in only if name != ENCODER)), only)
            taps[path] = self._taps_of(lambda model=model: cached(model, case, self._memory(case)))
        return taps

    def attention(self, case: Case) -> dict[str, Array]:
        memory = self._memory(case)

        def watched(names: Iterable[str]) -> dict[str, Any]:
            graphs = [name for name in names if name in CROSS_DECODERS]
            return {name: TappedSession(self.sessions[name], [CROSS_ATTENTION], self._observe) for name in graphs}

        runs = {PLAIN: lambda: graph_logits(self._model(watched(self._full_pass())), case, memory)}
        for path, only in self._ways().items():
            runs[path] = lambda only=only: cached(self._model(watched(only), only), case, memory)
        return {path: self._taps_of(run)[CROSS_ATTENTION] for path, run in runs.items()}

    def vectors(self, case: Case) -> dict[Kind, Array]:
        model = self._model()
        assert isinstance(model, EncoderGraphs)
        return {kind: model.vectors(case.inputs, case.source_mask, kind) for kind in self.capabilities.gives_vectors}

    def _memory(self, case: Case) -> Array | None:
        """Compute the untapped encoder's output (B,S,D); the last case's is kept."""
        if case.target_ids is None:
            return None
        if self._encoded is None or self._encoded[0] is not case:
            model = self._model()
            assert isinstance(model, EncoderDecoderGraphs)
            self._encoded = case, model.encode(case.inputs, case.source_mask)
        return self._encoded[1]

    def _model(self, instead: Mapping[str, Session] | None = None, only: Sequence[str] | None = None) -> Graphs:
        """Combine the graphs into a model. instead: sessions to replace, by graph. only: the graphs it may use."""
        sessions = {name: self.sessions[name] for name in (only or self.sessions)} | dict(instead or {})
        return graphs_of(self.folder.request, sessions)

    def _ways(self) -> dict[str, list[str]]:
        """Return {way of running with a cache: its graphs}."""
        if self.config.architecture != "encoder-decoder":
            return {} if self.config.architecture == "encoder" else {"cached": list(self.files)}
        pair = [name for name in self.files if name != DECODER_MERGED]
        ways = {"cached": pair, "cached, merged": [ENCODER, DECODER_MERGED]}
        return {path: names for path, names in ways.items() if {*names} <= {*self.files} and len(names) > 1}

    def _tapping(self, *names: str) -> dict[str, TappedSession]:
        """Open sessions of tapped copies of these graphs; without names, of all graphs."""
        taps = tap_names(self.config)
        for name in names or self.files:
            if name not in self._tapped:
                copy = add_taps(onnx.load(self.files[name], load_external_data=False), taps)
                self._tapped[name] = TappedSession(self.open(self.files[name], copy), taps, self._observe)
        return {name: self._tapped[name] for name in names or self.files}

    def _full_pass(self) -> set[str]:
        """Return the graphs of a full pass; empty if there is a single graph."""
        return self.files.keys() & {ENCODER, DECODER_FIRST if DECODER_FIRST in self.files else DECODER_MERGED}

    def _showing(self, graph: str, names: Sequence[str]) -> TappedSession:
        """Open a session of a graph's copy with these points as outputs."""
        if (key := (graph, *names)) not in self._tapped_sessions:
            model = onnx.load(self.files[graph], load_external_data=False)
            show_weights(model.graph)
            points = {value: point for point, value in points_of(model.graph, names).items()}
            session = self.open(self.files[graph], add_taps(model, list(points)))
            tapped = TappedSession(session, list(points), lambda value, array: self._observe(points[value], array))
            self._tapped_sessions[key] = tapped
        return self._tapped_sessions[key]

    def _taps_of(self, run: Callable[[], Any]) -> dict[str, Array]:
        """Run and return the taps, with passes joined along the positions."""
        self._observed = {}
        logits = run()
        observed = {name: np.concatenate(v, axis=1) if len(v) > 1 else v[0] for name, v in self._observed.items()}
        # Other heads' output has another name.
        return observed if self.config.head == VOCABULARY else {**observed, "logits": logits}

    def _observe(self, name: str, value: Array) -> None:
        self._observed.setdefault(name, []).append(value)


def graph_logits(model: Graphs, case: Case, memory: Array | None = None) -> Array:
    """Run a full pass. memory: the encoder's output if it is known."""
    mask = case.source_mask
    if isinstance(model, EncoderDecoderGraphs):
        assert case.target_ids is not None
        memory = model.encode(case.inputs, mask) if memory is None else memory
        return model.decode(case.target_ids, memory, mask)
    return model.logits(case.inputs, mask)


def cached(model: Any, case: Case, memory: Array | None = None) -> Array:
    """Run the passes of a case with a cache. memory: the encoder's output, if any."""
    assert not isinstance(model, EncoderGraphs)
    if isinstance(model, EncoderDecoderGraphs):
        assert case.target_ids is not None
        assert memory is not None
        ids, mask = case.target_ids, case.source_mask
        cache = model.begin(memory, mask)
    else:
        ids, mask = case.ids, case.prompt_mask
        real = np.ones(ids.shape, np.int64) if mask is None else mask.astype(np.int64)
        cache = model.begin(real[:, : case.prefill])
    step: Any = model.step
    return np.concatenate([step(np.ascontiguousarray(ids[:, part]), cache) for part in case.passes()], axis=1)


def check_same_model(folder: OnnxFolder | SearchModel, checkpoint: Checkpoint) -> None:
    pairs = {name: (getattr(folder.config, name), getattr(checkpoint.config, name)) for name in SHAPES}
    differing = [f"{name}={got!r}, not {expected!r}" for name, (got, expected) in pairs.items() if got != expected]
    if differing:
        raise UserError(f"{folder.path}: not exported from {checkpoint.folder}: it has {'; '.join(differing)}")


def _all_graphs(folder: OnnxFolder) -> dict[str, Path]:
    """Return every graph in the folder's precision, also graphs not needed for running."""
    merged = graph_file(next(iter(folder.graphs.values())).parent, DECODER_MERGED, PRECISIONS[folder.precision].suffix)
    return {**folder.graphs, **folder.listed, **({} if merged is None else {DECODER_MERGED: merged})}
