"""Compare runtimes, and the checkpoint itself, with the original network it was imported from (`--against`).

logits    within the runtime's usual budget, with the original's logits as the truth. The reference's own logits, in
          float64, are judged too
tokens    of searches the original can do too: equal, or a tie by the original's logits. With integers also a flip: an
          activation next to a half is rounded to the other side
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from export.targets.portable.runtime import SOURCE_MULTIPLE
from export.validate.cases import Case, reference_logits, reference_taps
from export.validate.checks.free_running import Judged, attempt, judge_beam, judge_greedy, sources_of, tokens_of
from export.validate.checks.int8 import IntegerReference, fixed_reference, on_its_integers, with_tables
from export.validate.checks.judging import Sample, SecondLook, judged_points, largest_error
from export.validate.engines.onnx_engine import OnnxEngine
from export.validate.engines.onnxruntime_engine import EXACT, integer_kernel
from export.validate.engines.protocol import Engine
from export.validate.engines.reference_engine import ReferenceEngine
from export.validate.findings import Point, Tokens
from export.validate.reference import Parameters, Reference
from export.validate.reference.search import beam_search, greedy_scores
from export.validate.rule import BUDGETS, UNIT, Deviation, ErrorScale, Truth
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.inputs import SOURCE_IDS, Sources
from mlx_transformer.decoding.options import Options
from mlx_transformer.families.conversion import ORIGIN
from mlx_transformer.families.hub import cached_model, original_path
from mlx_transformer.families.marian_files.conversion import ORIGIN as MARIAN
from mlx_transformer.generation.settings import read_settings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_object
from mlx_transformer.system.manifest import verify_files

from . import Array, Origin
from .hugging_face import HuggingFace, MlxLm
from .marian import Marian

ORIGINS = {kind.name: kind for kind in (HuggingFace, MlxLm, Marian)}
CHECKPOINT = "checkpoint"
"""The report's name for the float64 reference with the checkpoint's weights."""


@dataclass(frozen=True)
class Compared:
    """Results of a comparison with the original. `lines`: a description for the report. `checkpoint`: the reference."""

    points: tuple[Point, ...]
    tokens: tuple[Tokens, ...]
    lines: tuple[str, ...]
    checkpoint: Engine


def open_origin(against: str, original: Path | str | None, checkpoint: Checkpoint) -> Origin:
    """Open a checkpoint's original network, by default from the file or folder in the checkpoint's record.

    Raises UserError if it isn't recorded, isn't there, or can't be opened.
    """
    if original is None:
        original = recorded(against, checkpoint.folder)
    if not Path(original).exists():
        raise UserError(f"{original}: no such file or folder")
    if against != Marian.name and Path(original).is_file():  # e.g. a GGUF file
        way = f"mlx-transformer to-huggingface {checkpoint.folder} FOLDER{' --mlx-lm' * (against == MlxLm.name)}"
        raise UserError(f"{original}: {against} runs folders, no files: {way} writes one for --original FOLDER")
    return ORIGINS[against](Path(original), checkpoint.config)


def compare_with_origin(
    origin: Origin, checkpoint: Checkpoint, engines: Sequence[Engine], cases: Sequence[Case]
) -> Compared:
    """Judge the checkpoint in float64, and these engines. Raises UserError if an engine reads vectors."""
    stored = dict(checkpoint.tensors())
    own = ReferenceEngine(checkpoint.config, stored, "float64")
    own.name = CHECKPOINT
    if any(case.vectors is not None for case in cases):
        raise UserError(f"--against {origin.name}: the package reads vectors, the original ids")
    usable = [fitted for case in cases if (fitted := origin.fitted(case)) is not None]
    points, scales, moved = _points(origin, stored, [own, *engines], usable)
    limits = {
        engine.name: largest_error(engine.budget, scales) + moved.get(engine.name, 0.0) for engine in (own, *engines)
    }
    tokens = tuple(_tokens(origin, checkpoint, stored, [own, *engines], cases, limits))
    used = f"{len(usable)} of {len(cases)} inputs have the same positions there"
    lines = [f"against {origin.described()}", used, *_kernels(origin, engines, cases)]
    return Compared(tuple(points), tokens, tuple(lines), own)


def _points(
    origin: Origin, stored: Parameters, engines: Sequence[Engine], cases: Sequence[Case]
) -> tuple[list[Point], list[ErrorScale], dict[str, float]]:
    """Judge all engines' outputs. Returns (points, float32's own error at each output of each input, the most that an
    engine's fixed int8 scales move an output, which is no error of the engine)."""
    c = origin.config
    network64, network32 = (Reference(c, stored, kind) for kind in (np.float64, np.float32))
    fixed = {engine.name: network for engine in engines if (network := fixed_reference(engine, stored)) is not None}
    samples, scales, most = [], [], dict[str, float]()
    for case in cases:
        taps = [reference_taps(network, case) for network in (network64, network32)]
        moved = {name: reference_taps(network, case) for name, network in fixed.items()}
        for tap, original in origin.outputs(case).items():
            known = original.shape[-1]
            t64, t32 = (each[tap][..., :known] for each in taps)
            valid = case.counted(tap, original)
            scale = ErrorScale.of(t32[valid] - t64[valid], t64[valid])
            scales.append(scale)
            for engine in engines:
                if engine.capabilities.shows == "tokens":
                    continue
                got, why = attempt(lambda engine=engine, tap=tap, case=case: _output(engine, case, tap))
                shift = moved[engine.name][tap][..., :known] - t64 if engine.name in moved else np.zeros_like(t64)
                most[engine.name] = max(most.get(engine.name, 0.0), float(np.abs(shift[valid]).max(initial=0.0)))
                truth = Truth(original + shift, valid, scale)
                deviation = Deviation.of(None if got is None else got[..., :known], truth, why)
                samples.append(Sample(engine, f"against {origin.name}", tap, case, deviation, scale))
    return judged_points(samples, SecondLook(c, stored)), scales, most


def _output(engine: Engine, case: Case, tap: str) -> Array | None:
    return engine.logits(case) if tap == "logits" else engine.taps(case).get(tap)


def _tokens(
    origin: Origin,
    checkpoint: Checkpoint,
    stored: Parameters,
    engines: Sequence[Engine],
    cases: Sequence[Case],
    limits: Mapping[str, float],
) -> Iterator[Tokens]:
    c = checkpoint.config
    if not c.has_decoder:
        return
    sources, limit = _sources(origin, cases)
    settings = read_settings(checkpoint.folder, c)
    reference = Reference(c, stored)
    for name, options in origin.searches(limit, settings).items():
        expected = origin.search(sources, name, options)
        truth = beam_search(reference, sources, options) if options.beam > 1 else []
        for engine in (each for each in engines if each.capabilities.shows != "logits"):
            searched, why = attempt(lambda engine=engine, options=options: engine.search(sources, options))
            outputs = [ids for ids, _ in searched or []]
            if searched is None:
                judged = [Judged(problem=why)]
            elif options.beam > 1:
                judged = judge_beam(reference, truth, [[best] for best in searched], limits[engine.name])
                judged = [_of_beam(*row) for row in zip(judged, outputs, expected, strict=True)]
            else:
                judged = _greedy(origin, stored, engine, sources, outputs, options, limits[engine.name])
            yield tokens_of(engine, f"{origin.name}: {name}", judged, outputs, expected, _words)


def _sources(origin: Origin, cases: Sequence[Case]) -> tuple[list[list[int]], int]:
    """Return (sources of searches in the original's ids, most tokens of an output)."""
    sources, limit = sources_of(cases, origin.config)
    return [origin.fitted_row(row) for row in sources], limit


def _words(ids: Sequence[int]) -> tuple[str, ...]:
    return tuple(map(str, ids))


def _of_beam(judged: Judged, ids: list[int], expected: list[int]) -> Judged:
    """Judge an output of a beam search after the reference's verdict: only equal tokens or the reference's tie pass."""
    if ids == expected or judged.tie or judged.problem:
        return judged if ids != expected else Judged()
    return Judged(problem=f"{ids}, like the reference; the original writes {expected}")


def _greedy(
    origin: Origin,
    stored: Parameters,
    engine: Engine,
    sources: Sequence[list[int]],
    outputs: Sequence[list[int]],
    options: Options,
    limit: float,
) -> list[Judged]:
    """Judge greedy outputs by the original's logits along each output.

    An engine with fixed int8 scales is judged by the original's exact integer arithmetic; a flip may excuse it.
    """
    fixed = isinstance(engine, OnnxEngine) and engine.int8_scales.is_fixed
    if not (isinstance(origin, Marian) and origin.has_integers and fixed):
        return judge_greedy(origin, sources, outputs, options, limit)  # type: ignore[arg-type]
    exact, ours, single = origin.with_arithmetic("exact"), engine.budget, BUDGETS["float32", "cpu"]
    # With the same integers only float32's errors remain: shrink the limit from int8's budget to float32's.
    limit *= single.max * single.unit / (ours.max * ours.unit)
    judged = judge_greedy(exact, sources, outputs, options, limit)  # type: ignore[arg-type]
    return [
        certified_flip(engine, stored, source, ids, options) or j if j.problem else j
        for j, source, ids in zip(judged, sources, outputs, strict=True)
    ]


def certified_flip(
    engine: Any, stored: Parameters, source: list[int], ids: list[int], options: Options
) -> Judged | None:
    """Certify that flips explain an int8 output; None if they don't.

    The engine's integers along the output must be the reference's except for flips. The reference must choose the same
    tokens with these integers.
    """
    c, limit = engine.config, options.max_new_tokens or 0
    rows, mask = Sources.of(c, ids=[source]).padded(SOURCE_MULTIPLE, c.max_positions)
    case = Case("parted", rows[SOURCE_IDS.name], mask > 0, np.array([[c.bos_id, *ids[: limit - 1]]]), prefill=1)
    points = list(on_its_integers(engine, stored, [case], searching=True))
    if not points or not all(point.passed for point in points):
        return None
    what = c, with_tables(engine, stored), engine.int8_scales, engine.taps_with_integers(case, searching=True)[1]
    logits, single = (reference_logits(IntegerReference(*what, kind), case)[0] for kind in (np.float64, np.float32))
    tie = 2 * BUDGETS["float32", "cpu"].max * max(np.abs(single - logits).max(), UNIT * np.sqrt(np.mean(logits**2)))
    before = [c.bos_id]
    for i, token in enumerate([*ids, c.eos_id][: len(logits)]):
        scores = greedy_scores(logits[i], before, ids[:i], c, options)
        if scores.max() - scores[token] > tie:
            return None
    return Judged(tie="a certified flip: an activation next to a half is rounded to the other side")


def _kernels(origin: Origin, engines: Sequence[Engine], cases: Sequence[Case]) -> Iterator[str]:
    """Report this machine's integer kernel, and how often Marian's engine on AVX2 would write other tokens."""
    ours = [engine for engine in engines if engine.precision == "int8" and engine.name.startswith("onnxruntime")]
    if not ours:
        return
    cut = any(engine.sums_in_16_bits for engine in ours)
    yield f"integer kernel of ONNX Runtime here: {integer_kernel() if cut else EXACT}"
    if not isinstance(origin, Marian) or not origin.has_integers:
        return
    sources, limit = _sources(origin, cases)
    exact, theirs = (origin.with_arithmetic(kind) for kind in (EXACT, "saturating"))
    options = Options(max_new_tokens=limit)
    pairs = zip(exact.search(sources, "", options), theirs.search(sources, "", options), strict=True)
    apart = sum(one != other for one, other in pairs)
    yield (
        f"Marian's engine on AVX2, whose sums of two products have 16 bits, writes other tokens than exact integers in "
        f"{apart} of {len(sources)} sentences, by an emulation of its arithmetic"
    )


def recorded(against: str, checkpoint: Path) -> Path:
    """Return the original file or folder in the checkpoint's record. Raises UserError without a record or original."""
    file = checkpoint / (MARIAN if against == Marian.name else ORIGIN)
    try:
        if not file.is_file():
            raise UserError("the checkpoint doesn't say what it was imported from")
        record = read_object(file)
        if against == Marian.name and (copy := checkpoint / Path(str(record.get("model"))).name).is_file():
            verify_files(checkpoint, [copy.name])
            return copy
        if "repository" in record:
            return cached_model(str(record["repository"]), str(record.get("revision")))
        return original_path(record, checkpoint)
    except UserError as error:
        raise UserError(
            f"--against {against}: {error}: give --original, the file or folder that was imported"
        ) from None
