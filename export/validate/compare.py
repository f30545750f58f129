"""Compare each runtime with a checkpoint's weights and with the float64 reference of its network.

    files      the files around the graphs, e.g. the tokenizer, are made again from the checkpoint
    weights    bit for bit, wherever a runtime or a file holds them; every byte of a data file belongs to a tensor
    taps       the named points, in a copy of the model with inner values as outputs, on every input: judged by the
               rule, gathers bit for bit
    plain      logits of the model as people use it, without taps
    cached     logits pass by pass with a cache, with taps and without
    tokens     the likeliest token at every position; greedy search, beam search and sampling

Weights are read from the checkpoint when a layer or a check needs them. So a comparison takes little more memory than
the runtimes.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich import console as rich_console

from export.interface import CROSS_ATTENTION, TEXT_OUTPUTS
from export.precision.table import arithmetic
from export.runtime.folder import precisions, verify_export
from export.settings import JudgeSettings, ValidateSettings
from mlx_transformer.core.checkpoint import Checkpoint, open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import Place
from mlx_transformer.core.heads import EMBEDDING
from mlx_transformer.core.text_embedding import read_embedding
from mlx_transformer.families.conversion import as_checkpoint
from mlx_transformer.generation.settings import CHAT_TEMPLATES, read_settings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.lazy import needs
from mlx_transformer.system.machine import versions
from mlx_transformer.system.progress import Console, Progress, no_progress, quiet_progress
from mlx_transformer.system.tensors import stored_tensors, write_tensors
from mlx_transformer.text.chat import ChatTemplates

from .cases import Case, Extras, grid, reference_outputs, share_of, tokenised, weights_name, with_vectors
from .checks.free_running import (
    FAILED,
    CandidatesOf,
    TokenText,
    attempt,
    candidates_of,
    free_running,
    logits_among,
    token_text,
)
from .checks.gradients import Gradient, check_gradients
from .checks.int8 import fixed_reference, on_its_integers
from .checks.judging import CHOOSING, Agreement, Sample, SecondLook, judged_points, largest_error
from .checks.structure import structures
from .checks.weights import check_weights, data_files, reference_weights
from .engines import default_runtimes, full_name, open_engine
from .engines.onnx_engine import OnnxEngine
from .engines.opaque_engines import ForeignEngine, is_foreign, parse_names
from .engines.protocol import Engine, Unavailable, in_turn, is_large
from .engines.stored import OnnxFiles
from .findings import AMONG, ON_INTEGERS, PLAIN, TAPPED, PackageFiles, Point, Runtime, Tokens
from .locate import Culprit, isolate
from .reference import Parameters, Reference
from .report import Report, claim_reports
from .report.data import note_in_cards
from .rule import Deviation, Truth

if TYPE_CHECKING:
    from typing import Unpack

    from export.arguments import JudgeArguments

    from .origin import Origin

Array = NDArray

BESIDE = (CROSS_ATTENTION, *TEXT_OUTPUTS.values())
"""Outputs besides the logits. If they are wrong, no operation on the path to the logits is to blame."""
KEPT_TRUTHS = 16 << 20
"""Most bytes of an input's truths in memory while runtimes run."""
TEACHER_FORCED = 0.7  # rough share of the time spent before the searches


# Names in plain builds, and in the wheels of NumPy and SciPy, with 32 and 64 bit integers.
SETTERS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]


@contextmanager
def one_blas_thread() -> Iterator[int]:
    """Give every OpenBLAS in this process a single thread, and restore its number of threads at the end.

    NumPy's OpenBLAS, MLX and ONNX Runtime each have a thread pool, and an idle pool spins for a while in case more work
    comes. Measured on two busy cores with a small model: 18 to 26 s, and 4 to 8 s with a single BLAS thread.

    Yields how many were found. Does nothing outside Linux: the libraries are found in /proc (and macOS uses
    Accelerate).
    """
    before = [(library, name, get()) for library, name, get in _openblas()]
    try:
        for library, name, _ in before:
            getattr(library, name)(1)
        yield len(before)
    finally:
        for library, name, threads in before:
            getattr(library, name)(threads)


def _openblas() -> Iterator[tuple[ctypes.CDLL, str, ctypes._CFuncPtr]]:  # type: ignore[name-defined]
    """Yield (library, name of its function to set threads, function to get them)."""
    try:
        mappings = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    paths = {line.split(maxsplit=5)[5] for line in mappings if "openblas" in line.lower()}
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in SETTERS:
            if hasattr(library, name):
                yield library, name, getattr(library, name.replace("_set_", "_get_"))


def compare(
    checkpoint: str | Path,
    onnx: str | Path | None,
    runtimes: Sequence[str] | None = None,
    seed: int | None = None,
    settings: JudgeSettings = JudgeSettings(),
    *,
    longest: int | None = None,
    searches: bool = True,
    watch: Progress = no_progress,
    **changes: Unpack[JudgeArguments],
) -> Report:
    """Compare every runtime with a checkpoint folder or a published folder; onnx: the ONNX folder made from it.

    runtimes: names in `engines.ENGINES` with options, e.g. ["mlx:gpu", "onnxruntime"]. By default MLX (also on a GPU if
        the machine has one) and ONNX Runtime; the report lists those not installed.
    seed: draws the inputs; the same seed repeats a run.
    longest: largest number of tokens of an input.
    searches: False skips the searches and saves half of the time.
    watch: called with the share done and the current step.
    settings, changes: fields of `export.settings.JudgeSettings`.

    For another exporter's ONNX file or folder only the logits are judged; `names` maps its inputs and outputs (see
    `engines/opaque_engines.py`).

    Raises Unavailable if a named runtime isn't available here, and UserError if a folder isn't such a model.
    """
    settings = replace(settings, **changes)
    threads, names = settings.threads, parse_names(settings.names)
    named, onnx = onnx, None if onnx is None else _file_of(Path(onnx))
    engines, absent = list[Engine](), list[str]()
    with ExitStack() as stack:
        opened = open_checkpoint(stack.enter_context(as_checkpoint(checkpoint))).widened()
        origin = _origin(settings, opened)
        files = None if onnx is None else _package_files(opened, onnx)
        seed = secrets.randbits(32) if seed is None else seed
        if files is not None and files.misleading:
            return _of_files_alone(opened, str(named), seed, files)
        for name in map(full_name, runtimes if runtimes is not None else _default_runtimes(opened, onnx)):
            try:
                if onnx is not None and name == "onnxruntime" and is_foreign(Path(onnx)):
                    engines.append(ForeignEngine(opened, Path(onnx), names, threads))
                else:
                    engines.append(open_engine(name, opened, None if onnx is None else Path(onnx), threads))
                stack.callback(engines[-1].close)
            except Unavailable:
                if runtimes is not None:
                    raise
                absent.append(name)
        if not engines:
            raise Unavailable(f"none of the runtimes {', '.join(runtimes or absent)} is available here")
        vectors = any(engine.capabilities.reads_vectors for engine in engines)
        texts = [] if vectors else tokenised(opened.tokenizer_path, opened.config)
        positions = opened.config.max_positions
        share = 1.0 if settings.thorough else share_of(opened.config)
        cases = grid(opened.config, seed, texts, min(longest or positions, positions), share)
        cases = with_vectors(cases, opened.config, seed) if vectors else cases
        report = compare_engines(
            opened,
            engines,
            cases,
            watch,
            candidates_of(settings.shortlist, opened),
            searches=searches,
            share=share,
        )
        derivatives = _gradients(opened, seed) if settings.gradients else ()
        if origin is not None:
            report = _with_origin(report, origin, opened, engines, cases)
    report = replace(report, seed=seed, onnx=str(named), absent=tuple(absent), gradients=derivatives, files=files)
    return replace(report, checkpoint=str(checkpoint)) if Place.of(checkpoint).is_importable else report


def _file_of(onnx: Path) -> Path:
    """Return the ONNX file in a Triton folder; any other path is returned as it is."""
    file = onnx / "1" / "model.onnx"
    return file if (onnx / "config.pbtxt").is_file() and file.is_file() else onnx


def _package_files(opened: Checkpoint, onnx: Path) -> PackageFiles | None:
    from .checks.package_files import package_files  # lazy: comparing MLX without ONNX doesn't need the export code

    return package_files(opened, onnx)


def _of_files_alone(opened: Checkpoint, onnx: str, seed: int, files: PackageFiles) -> Report:
    """Report only the files of a package with a wrong mlx_transformer.json: runtimes would run its graphs wrongly."""
    nothing: dict[str, Any] = dict.fromkeys(("runtimes", "absent", "inputs", "weights", "points", "tokens"), ())
    return Report(str(opened.folder), onnx, seed, **nothing, seconds=0.0, versions=versions(), files=files)


def assert_equal(
    checkpoint: str | Path,
    onnx: str | Path | None,
    runtimes: Sequence[str] | None = None,
    seed: int | None = None,
    threads: int | None = None,
) -> Report:
    """Like `compare`, for test suites.

    Raises AssertionError if anything differs. Its message names the first failure, the operation to blame and the seed
    to repeat the run with.
    """
    report = compare(checkpoint, onnx, runtimes, seed, threads=threads)
    if not report.equal:
        first = report.failures()
        culprits = [f"{c.runtime}: culprit: {c.sentence}" for c in report.culprits if c.point or c.why]
        lines = dict.fromkeys([*first[:1], *culprits])
        raise AssertionError(f"{checkpoint} and {onnx} differ (seed {report.seed}): {'; '.join(lines)}")
    return report


def _default_runtimes(checkpoint: Checkpoint, onnx: str | Path | None) -> list[str]:
    """Return MLX (also on a GPU if the machine has one), in float32 and in the checkpoint's own 16 bits, and ONNX
    Runtime in every precision of the folder."""
    available = [] if onnx is None or is_foreign(Path(onnx)) else precisions(onnx)
    lower = available[1:] if "float32" in available or len(available) == 1 else available
    runtimes, own = [*default_runtimes()], checkpoint.precision
    if own != "float32" and not checkpoint.quantization:
        runtimes += [f"mlx:{device}:{own}" for device in ("cpu", "gpu") if device == "cpu" or "mlx:gpu" in runtimes]
    return [*runtimes, *(f"onnxruntime:cpu:all:{precision}" for precision in lower)]


def _origin(settings: JudgeSettings, checkpoint: Checkpoint) -> Origin | None:
    """Open the original network for `--against`. This comes first, so that errors don't come after minutes of work."""
    if settings.against is None:
        if settings.original is not None:
            raise UserError("--original needs --against: add e.g. --against transformers")
        return None
    from .origin.check import open_origin

    return open_origin(settings.against, settings.original, checkpoint)


@one_blas_thread()
def _with_origin(
    report: Report, origin: Origin, checkpoint: Checkpoint, engines: Sequence[Engine], cases: Sequence[Case]
) -> Report:
    """Add the comparison with the original network to a report.

    Engines with float32 activations and quantised weights compute another network, so only the checkpoint judges them.
    """
    from .origin.check import compare_with_origin

    begin, stored = time.perf_counter(), checkpoint.unread()
    members = [engine for engine in engines if reference_weights(engine, stored) is stored]
    result = compare_with_origin(origin, checkpoint, members, cases)
    others = [f"{engine.name}: compared only with the checkpoint" for engine in engines if engine not in members]
    return replace(
        report,
        runtimes=(*report.runtimes, _runtime(result.checkpoint)),
        points=(*report.points, *result.points),
        tokens=(*report.tokens, *result.tokens),
        against=(*result.lines, *others),
        seconds=report.seconds + time.perf_counter() - begin,
    )


def _runtime(e: Engine) -> Runtime:
    return Runtime(
        *(e.name, e.precision, e.device, e.budget, e.details()),
        arithmetic=arithmetic(e.precision, e.activations, e.float32_layers, e.sums_in_16_bits),
        retrieval=e.retrieval,
        logits_only=e.capabilities.shows == "logits",
        missing_taps=e.capabilities.missing_taps,
        search_only=e.capabilities.shows == "tokens",
    )


@one_blas_thread()
def _gradients(checkpoint: Checkpoint, seed: int) -> tuple[Gradient, ...]:
    if find_spec("mlx") is None:
        raise Unavailable(f"gradients are MLX's, which is not installed: {needs('train')}")
    return tuple(check_gradients(checkpoint.config, dict(checkpoint.tensors()), seed))


@one_blas_thread()
def compare_engines(
    checkpoint: Checkpoint,
    engines: Sequence[Engine],
    cases: Sequence[Case],
    watch: Progress = no_progress,
    listed: CandidatesOf | None = None,
    *,
    searches: bool = True,
    share: float = 1.0,
) -> Report:
    """Like `compare`, for opened engines and given inputs. listed, share: see `free_running`."""
    with TemporaryDirectory() as folder:
        stored: Parameters = checkpoint.unread()
        if checkpoint.quantization or checkpoint.adapter is not None:
            stored = _computed_once(stored, Path(folder) / "stored")
        return _compared(checkpoint, stored, Path(folder), engines, cases, watch, (searches, share, listed))


def _computed_once(weights: Parameters, file: Path) -> Parameters:
    """Store large weights in a file, as they would be dequantised or merged again each time they are read."""
    if not is_large(sum(array.nbytes for array in weights.values())):
        return weights
    write_tensors(file, weights)
    return stored_tensors(file)


def _compared(
    checkpoint: Checkpoint,
    stored: Parameters,
    folder: Path,
    engines: Sequence[Engine],
    cases: Sequence[Case],
    watch: Progress,
    how: tuple[bool, float, CandidatesOf | None],
) -> Report:
    searches, share, listed = how
    begin, words = time.perf_counter(), token_text(checkpoint)
    settings = read_settings(checkpoint.folder, checkpoint.config)
    inspected = [engine for engine in engines if engine.capabilities.shows != "logits"]
    weights = [check for engine in in_turn(inspected) for check in check_weights(engine, stored)]
    files = tuple(data_files(inspected))
    weights_of = {engine.name: reference_weights(engine, stored) for engine in engines}
    # Engines of one network share its truths; fixed int8 scales make a network of their own.
    networks: dict[tuple[int, str], list[Engine]] = {}
    for engine in engines:
        fixed = isinstance(engine, OnnxFiles) and engine.int8_scales.is_fixed
        networks.setdefault((id(weights_of[engine.name]), engine.name if fixed else ""), []).append(engine)
    points: list[Point] = []
    tokens: list[Tokens] = []
    judged = 0
    for number, members in enumerate(networks.values()):
        known = weights_of[members[0].name]
        network = known if known is stored else _computed_once(known, folder / f"network{number}")
        weights_of |= dict.fromkeys((engine.name for engine in members), network)
        begun, part = judged / len(engines), len(members) / len(engines)

        def within(share: float, status: str, begun: float = begun, part: float = part) -> None:
            watch(begun + part * share, status)

        judged += len(members)
        for engine in (each for each in members if isinstance(each, OnnxEngine) and each.int8_scales.is_fixed):
            points += on_its_integers(engine, stored, cases)
        extras = _extras_of(checkpoint, members)
        generation = (settings, listed, share) if searches else None
        network_points, network_tokens = _against(
            checkpoint.config, network, members, cases, words, within, generation, extras
        )
        points += network_points
        tokens += network_tokens
    report = Report(
        checkpoint=str(checkpoint.folder),
        onnx="",
        seed=0,
        runtimes=tuple(map(_runtime, engines)),
        absent=(),
        inputs=tuple(f"{case.name} ({case.size})" for case in cases),
        weights=tuple(weights),
        points=tuple(points),
        tokens=tuple(tokens),
        seconds=time.perf_counter() - begin,
        versions=versions(),
        placements=tuple(engine.placement() for engine in engines),
        structures=tuple(structures(in_turn(inspected))),
        data_files=files,
        share=share,
        chat_template=ChatTemplates(settings[CHAT_TEMPLATES]).digest if settings.get(CHAT_TEMPLATES) else "",
    )
    culprits = tuple(_culprits(report, engines, cases, weights_of))
    return replace(report, culprits=culprits, seconds=time.perf_counter() - begin)


def _against(
    c: TransformerConfig,
    weights: Parameters,
    engines: Sequence[Engine],
    cases: Sequence[Case],
    words: TokenText,
    watch: Progress,
    generation: tuple[Mapping[str, Any], CandidatesOf | None, float] | None,
    extras: Extras,
) -> tuple[list[Point], list[Tokens]]:
    """Compare the engines of a network with its reference; returns (points, tokens).

    generation: (the model's own search settings, its shortlist's candidates, the share of the usual sentences and
    tokens); None skips the searches.
    extras: see `reference_outputs`.
    """
    inner = extras.layer is not None
    truth64, truth32 = (Reference(c, weights, kind, inner_points=inner) for kind in (np.float64, np.float32))
    fixed = fixed_reference(engines[0], weights, inner)
    found: list[tuple[int, Sample]] = []
    agreement = Agreement()
    with TemporaryDirectory() as folder:
        truths: list[KeptTruths] = []
        for done, case in enumerate(cases):
            watch(TEACHER_FORCED / 2 * done / len(cases), f"reference, input {case.name} ({case.size})")
            truths.append(KeptTruths(_truths(truth64, truth32, fixed, case, extras), Path(folder) / f"{done}.npz"))
        scales = [each.of["logits"].scale for each in truths]
        # First all inputs with taps, then all without: a large session is opened once for each.
        work = [(engine, way, i) for engine in engines for way in (_tapped, _plain) for i in range(len(cases))]
        last = engines[0]
        for done, (engine, way, i) in enumerate(work):
            if engine is not last:
                last.rest()
            case, last = cases[i], engine
            what = f"{'inner points' if way is _tapped else 'input'} {case.name} ({case.size})"
            watch(TEACHER_FORCED / 2 * (1 + done / len(work)), f"{engine.name}, {what}")
            known = truths[i].read()
            for path, tap, got, why in way(engine, case, known, extras):
                truth = known[tap] if engine.is_exact else replace(known[tap], bits=None)
                found.append((i, Sample(engine, path, tap, case, Deviation.of(got, truth, why), truth.scale)))
                if tap == "logits" and c.head.kind in CHOOSING:
                    agreement.add(engine.name, path, case, got, truth)
            if way is _plain:
                found += [(i, sample) for sample in logits_among(engine, case, known["logits"])]
        last.rest()
    samples = [sample for _, sample in sorted(found, key=lambda pair: (pair[0], _order(pair[1].path)))]
    limits = {engine.name: largest_error(engine.budget, scales) for engine in engines}
    inspected = [engine for engine in engines if engine.capabilities.shows != "logits"]
    look = SecondLook(c, weights, extras)
    # Fixed scales are a network of their own, and `on_its_integers` takes the runtime's rounding into its reference.
    points = judged_points(samples, look, in_proportion=look.in_proportion if fixed is None else lambda sample: None)
    tokens = list(agreement.judged(limits))
    if generation is not None:
        watch(TEACHER_FORCED, "free decoding")
        tokens += free_running(fixed or truth64, inspected, cases, limits, words, *generation)
    return points, tokens


class KeptTruths:
    """The truths of an input; if they have many numbers, these are in a file, and `of` has the truths without them."""

    def __init__(self, truths: dict[str, Truth], file: Path) -> None:
        self.of, self.file = truths, None
        if sum(truth.t64.nbytes for truth in truths.values()) > KEPT_TRUTHS:
            np.savez(file, **{name: truth.t64 for name, truth in truths.items()})  # type: ignore[arg-type]
            self.of, self.file = {name: replace(truth, t64=np.empty(0)) for name, truth in truths.items()}, file

    def read(self) -> dict[str, Truth]:
        if self.file is None:
            return self.of
        with np.load(self.file) as numbers:
            return {name: replace(truth, t64=numbers[name]) for name, truth in self.of.items()}


def _culprits(
    report: Report, engines: Sequence[Engine], cases: Sequence[Case], weights_of: Mapping[str, Parameters]
) -> Iterator[Culprit]:
    """For each runtime over budget, find the operation behind its first point over budget."""
    inputs = {case.name: case for case in cases}
    for engine in engines:
        point = report.first_over_budget(engine.name)
        failed = point is not None and point.worst.deviation.detail.startswith(FAILED)  # no operation to blame
        if (
            point is not None
            and not failed
            and point.path not in (ON_INTEGERS, AMONG)
            and point.tap not in BESIDE
            and engine.capabilities.isolates
        ):
            position = next(iter(point.worst.deviation.index[1:]), None)
            yield isolate(engine, weights_of[engine.name], inputs[point.case], point.path, point.tap, position)


def _extras_of(checkpoint: Checkpoint, engines: Sequence[Engine]) -> Extras:
    """Find the optional outputs of these engines' graphs. Raises UserError if the checkpoint doesn't define them."""
    layers = (engine.capabilities.attention_layer for engine in engines)
    embedding = None
    if kinds := {kind for engine in engines for kind in engine.capabilities.gives_vectors}:
        embedding = read_embedding(checkpoint.folder, checkpoint.config.d_model)
        known = () if embedding is None else embedding.kinds
        if missing := [name for kind, name in TEXT_OUTPUTS.items() if kind in kinds and kind not in known]:
            why = f"has no {EMBEDDING}" if embedding is None else f"its {EMBEDDING} has nothing"
            raise UserError(
                f"{checkpoint.folder}: {why}, by which the graphs' {missing[0]} could be judged: "
                "give the checkpoint that they were exported from"
            )
        assert embedding is not None
        cut = next((e.capabilities.dimensions for e in engines if e.capabilities.gives_vectors), None)
        embedding = embedding.cut(cut, checkpoint.config.d_model)
    return Extras(next((layer for layer in layers if layer is not None), None), embedding)


def _truths(
    truth64: Reference, truth32: Reference, fixed: Reference | None, case: Case, extras: Extras
) -> dict[str, Truth]:
    """Compute every tap of an input with both references, from embedding to logits. extras: see `reference_outputs`.

    fixed: the network with fixed int8 scales; its values then are the truth instead of float64's.
    """
    single = reference_outputs(truth32, case, extras)
    truths = {
        name: Truth.of(t64, single[name], case.counted(name, t64), exact=name.endswith(".embedding"))
        for name, t64 in reference_outputs(truth64, case, extras).items()
    }
    values = {} if fixed is None else reference_outputs(fixed, case, extras)
    return truths | {name: replace(truths[name], t64=value) for name, value in values.items()}


Outputs = Iterator[tuple[str, str, Array | None, str]]
"""(path, tap, tensor or None, reason for None) for every output of a runtime for an input."""


def _order(path: str) -> int:
    """Taps come before logits: the report names the first failing point."""
    return [TAPPED, PLAIN].index(path) if path in (TAPPED, PLAIN) else 2 if path.endswith(f", {TAPPED}") else 3


def _tapped(engine: Engine, case: Case, truths: Mapping[str, Truth], extras: Extras) -> Outputs:
    """Yield the outputs of copies of the model with taps as outputs."""
    can = engine.capabilities
    if can.shows != "everything":
        return
    taps = [name for name in truths if name not in BESIDE]
    values, why = attempt(lambda: engine.taps(case))
    taps = [name for name in taps if name not in can.missing_taps]
    for name in taps:
        yield TAPPED, name, None if values is None else values.get(name), why
    cached_taps, why = attempt(lambda: engine.cached_taps(case))
    for path, values in {"cached": {}}.items() if cached_taps is None else cached_taps.items():
        for name in taps:
            if name == "logits" or name.startswith("decoder."):
                yield f"{path}, {TAPPED}", name, values.get(name), why


def _plain(engine: Engine, case: Case, truths: Mapping[str, Truth], extras: Extras) -> Outputs:
    """Yield the outputs of the model as people use it."""
    if engine.capabilities.shows == "tokens":
        return
    yield PLAIN, "logits", *attempt(lambda: engine.logits(case))
    if engine.capabilities.shows == "logits":
        return
    cached, why = attempt(lambda: engine.cached_logits(case))
    for path, logits in {"cached": None}.items() if cached is None else cached.items():
        yield path, "logits", logits, why
    yield from _attention(engine, case, extras.layer)
    if (kinds := engine.capabilities.gives_vectors) and engine.capabilities.shows == "everything":
        values, why = attempt(lambda: engine.vectors(case))
        for kind in kinds:
            yield PLAIN, TEXT_OUTPUTS[kind], None if values is None else values[kind], why


def _attention(engine: Engine, case: Case, layer: int | None) -> Outputs:
    """Yield `cross_attention`.

    Graphs with this output are run in every way, e.g. cached. For other runtimes the weights inside the layer are
    averaged over the heads.
    """
    if layer is None or engine.capabilities.shows != "everything":
        return
    if engine.capabilities.attention_layer is not None:
        values, why = attempt(lambda: engine.attention(case))
        for path, value in {PLAIN: None}.items() if values is None else values.items():
            yield path, CROSS_ATTENTION, value, why
        return
    name = weights_name(layer)
    value, why = attempt(lambda: np.mean(engine.points(case, [name])[name], axis=1))
    yield TAPPED, CROSS_ATTENTION, value, why


def runtime_names(chosen: str | Sequence[str] | None) -> list[str] | None:
    """Split runtime names at commas, e.g. "mlx,onnxruntime". Lists are copied; None means the default runtimes."""
    if chosen is None or not isinstance(chosen, str):
        return None if chosen is None else list(chosen)
    names = [name.strip() for name in chosen.split(",")]
    twice = [name for name in names if names.count(name) > 1]
    if not all(names) or twice:
        what = f"{twice[0]!r} twice" if all(names) else "an empty name"
        raise UserError(f"--runtimes {chosen!r}: {what}; give names separated by commas")
    return names


def validate_command(
    checkpoint: str | Path,
    onnx: str | Path,
    *,
    console: rich_console.Console | None = None,
    **settings: Any,
) -> int:
    """Compare, print the report and return the exit status (see `report`).

    Writes the report as JSON and HTML if asked, and the verdict into the model cards of both folders. By default files
    are first verified by their manifest's digests, so that a damaged file is an error (status 2), not a mismatch.
    Errors are printed as a line on standard error.

    settings: fields of `export.settings.ValidateSettings`, e.g. runtimes=["mlx"], json="report.json".
    """
    try:
        chosen = ValidateSettings(**settings)
        json, html = chosen.json, chosen.html
        if json is not None and html is not None and os.path.realpath(json) == os.path.realpath(html):
            raise UserError(f"{json}: can't be both, JSON and a page; give --json and --html different names")
        first, second = claim_reports(json, html, chosen.force, Path(checkpoint), Path(onnx))
        if chosen.verify:
            verify_export(Path(onnx))
        with quiet_progress("validate") as watch:
            report = compare(checkpoint, onnx, runtime_names(chosen.runtimes), chosen.seed, chosen, watch=watch)
        if first is not None:
            report.write(first)
        if second is not None:
            report.write_html(second)
        try:
            note_in_cards(report)
        except UserError as error:  # e.g. a read-only folder: it can still be equal
            Console(stderr=True, soft_wrap=True).print(f"validate: {error}", style="yellow", markup=False)
        report.print(console)  # last: the reader may have closed the pipe, e.g. `| head`
    except UserError as error:
        Console(stderr=True, soft_wrap=True).print(f"validate: {error}", style="red", markup=False)
        return error.status
    return report.exit_code
