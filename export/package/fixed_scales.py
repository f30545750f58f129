"""Fixed int8 scales for activations: calibrate them on a text, and decide whether a model gets them.

    text --> rows of ids --> greedy outputs --> float32 graphs, teacher-forced --> max|x| per token at each product
                                                                                    |
    a = steps / (a percentile of max|x| over all tokens) <--------------------------+

An encoder-decoder is calibrated on its own translations, since it will read those; other models on the text itself.
Behind a ReLU there are 255 steps above zero, elsewhere 127 on either side; in Marian's files always 127.

Without fixed scales int8 computes one scale per token at run time. Fixed scales come from, in this order:

    --calibrate FILE                       calibrated on that text
    int8_scales.json of the checkpoint     e.g. of an imported Marian model
    the run's validation text              calibrated on it, if the run's record names it and it hasn't changed

Calibration uses the text's even lines; its odd lines are judged as in `quality.py`. Of several percentiles that with
the most best tokens equal to float32's wins. If even this one is beyond the limits, activations get a scale per token.

In an encoder-only model, if fixed scales everywhere lose too much, they are tried in attention only, and kept if nearly
as many neighbours survive as with scales per token. In feed-forward nets a text's first token may have numbers six to
ten times as large as the rest, which one scale can't hold. Attention costs nothing to fix and has half of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.graph.edit import Nodes
from export.interface import DECODER_FIRST, DECODER_NEXT, ENCODER, MODEL, Request
from export.precision.int8 import BY_ROW, ROUNDED
from export.precision.packed import unpack_on_load
from export.precision.products import least_of, linears
from export.precision.rounding import one_multiplier
from export.settings import ExportSettings
from export.targets.portable.runtime import CausalGraphs, EncoderDecoderGraphs, EncoderGraphs
from export.targets.session import Session
from export.targets.table import target_of
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources
from mlx_transformer.core.int8_scales import (
    INT8_SCALES,
    SIGNED,
    SYMMETRIC,
    UNSIGNED,
    Int8Scales,
    ProductScales,
    multiplied_names,
    read_int8_scales,
)
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.data import built_in
from mlx_transformer.data.corpus import read_parallel, read_text_lines
from mlx_transformer.data.documents import read_documents
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json
from mlx_transformer.system.progress import Progress, no_progress

from .plan import Plan
from .quality import Expected, Quality, Text, rows_of
from .weights import fill

if TYPE_CHECKING:
    from export.runtime import OnnxTransformer

GRAPHS = {"encoder-decoder": (ENCODER, DECODER_FIRST), "decoder": (MODEL,), "encoder": (MODEL,)}
"""By architecture, the graphs for reading a text in one pass."""
LARGEST = "/largest"
"""Ending of an extra output: max|x| per token of the input to the product with the parameter of this name."""


@dataclass
class Site:
    """The inputs seen at a product. positive: never negative; largest: max|x| per token."""

    positive: bool
    largest: list[NDArray[np.float32]] = field(default_factory=list)

    def scales(self, percentile: float, symmetric: bool = False) -> ProductScales:
        """The scale for clipping inputs beyond this percentile of the tokens; an empty ProductScales if nothing was
        seen."""
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
    """Return {parameter name: inputs of its product} while the model reads rows of ids.

    An encoder-decoder also writes `outputs`, teacher-forced. folder: an empty folder for the graphs. Each row is run by
    itself, so no padding is measured.
    """
    config, sites = checkpoint.config, dict[str, Site]()
    request = Request(config=config)
    sessions = {name: _session(checkpoint, request, name, folder, sites) for name in GRAPHS[config.architecture]}
    if config.architecture == "encoder-decoder":
        sessions[DECODER_NEXT] = sessions[DECODER_FIRST]  # teacher forcing needs no later step
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
    """Return the int8 scales for these measurements.

    before: its weight multipliers, and its matrices in float32, are kept. symmetric: 127 steps on either side
    everywhere, as in Marian's files.
    """
    scales = {name: site.scales(percentile, symmetric) for name, site in sites.items()}
    products = {
        name: replace(scales.get(name, ProductScales()), weight=before.of(name).weight)
        for name in quantizable_shapes(config)
    }
    return Int8Scales(products, {**origin, "percentile": percentile}).leaving(before.float32, config)


def whole_matrices(checkpoint: Checkpoint) -> Int8Scales:
    """Multipliers for matrices whose rows can share a scale: a product with a single row then takes 2/3 of the time."""
    names = sorted(multiplied_names(checkpoint.config))
    return Int8Scales({name: ProductScales(weight=one_multiplier(checkpoint.tensor(name))) for name in names})


def _session(checkpoint: Checkpoint, request: Request, name: str, folder: Path, sites: dict[str, Site]) -> Session:
    """Open a float32 graph with max|x| of each product's input as extra outputs."""
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
    """A session with the usual outputs only: each run adds max|x| to the sites."""

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


CALIBRATED, JUDGED = 300, 200
"""Most lines for calibrating, and for judging."""
PERCENTILES = (100.0, 99.9)
"""Percentiles to try, of max|x| over all tokens; 100 is the largest."""
ATTENTION = ".self_attention."
"""Part of the names of matrices to give fixed scales in an encoder if not all matrices can have them."""
MORE_LOST = 0.005
"""Largest share of neighbours lost to fixed scales in attention, compared with scales per token."""


@dataclass(frozen=True)
class CalibrationText(Text):
    """The lines of a whole file, and its SHA-256."""

    sha256: str

    def parts(self) -> tuple[list[str], Text]:
        """Split into the lines to calibrate on, and the text to judge on."""
        filled = [i for i, line in enumerate(self.source) if line.strip()]
        judged = (filled[1::2] or filled)[:JUDGED]
        reference = None if self.reference is None else [self.reference[i] for i in judged]
        text = Text([self.source[i] for i in judged], reference, self.origin)
        return [self.source[i] for i in filled[::2][:CALIBRATED]], text


def settled(
    plan: Plan,
    settings: ExportSettings,
    write: Callable[[Plan, Path], None],
    log: Callable[[str], None],
    watch: Progress = no_progress,
) -> Plan:
    """Return the plan with its fixed scales, or unchanged for scales per token.

    write: writes a plan's package into an empty folder. `log` gets a line on the source of the scales, or why there are
    none. Raises UserError if `settings` ask for fixed scales and there is no text for them, or they lose too much.
    """
    if "int8" not in plan.precisions:
        return plan
    checkpoint = plan.checkpoint
    own = read_int8_scales(checkpoint.folder, plan.config) or BY_ROW
    plan = replace(plan, int8_scales=plan.int8_scales.leaving(own.float32, plan.config))
    left = plan.int8_scales.float32
    if settings.int8_scales == "token":
        return plan
    if own.is_fixed and settings.calibrate is None:
        log(f"int8: fixed scales of {checkpoint.folder / INT8_SCALES}")
        return replace(plan, int8_scales=own.leaving(left, plan.config))
    text = calibration_text(checkpoint, settings.calibrate, log)
    if text is None:
        if settings.int8_scales == "fixed":
            raise UserError(
                f"{checkpoint.folder}: nothing to take fixed scales from: no {INT8_SCALES}, and no validation text of"
                " its run; give text with --calibrate FILE"
            )
        return plan
    watch(0.0, "int8 scales")
    encodes = plan.config.architecture == "encoder"  # its products have many rows: one scale per matrix gains nothing
    before = (own if own.is_fixed else BY_ROW if encodes else whole_matrices(checkpoint)).leaving(left, plan.config)
    with TemporaryDirectory() as place:
        trial = Trial(plan, text, write, Path(place))
        scales, quality = trial.best(before)
        if not quality.problems:
            log(f"int8: fixed scales from {scales.origin['sentences']} lines of {text.origin}; on others: {quality}")
            return replace(plan, int8_scales=scales)
        reasons = "; ".join(quality.problems)
        if encodes and settings.int8_scales is None:
            some, its = trial.best(before, ATTENTION)
            if its.agreement >= trial.agreement(plan.int8_scales) - MORE_LOST:
                elsewhere = f"a scale a token elsewhere: with fixed ones from {text.origin}: {reasons}"
                log(f"int8: fixed scales in attention, {elsewhere}; {its}")
                return replace(plan, int8_scales=some)
    if settings.int8_scales == "fixed" and not settings.accept_loss:
        raise UserError(
            f"{text.origin}: fixed scales from it lose too much: {reasons}; give other text, or leave them out"
        )
    if settings.int8_scales == "fixed":
        return replace(plan, int8_scales=scales)
    log(f"int8: a scale a token: with fixed ones from {text.origin}: {reasons}")
    return plan


class Trial:
    """A float32 model after reading the calibration lines, and the other lines, on which int8 is judged."""

    def __init__(self, plan: Plan, text: CalibrationText, write: Callable[[Plan, Path], None], place: Path) -> None:
        """place: an empty folder, for packages."""
        self.plan, self.write, self.place = plan.plain(), write, place
        lines, judged = text.parts()
        wide = self._written(precisions=("float32",))
        assert wide.tokenizer is not None
        rows = rows_of(plan.config, wide.tokenizer, lines)
        translates = plan.config.architecture == "encoder-decoder"
        (place / "graphs").mkdir()
        self.sites = observe(plan.checkpoint, place / "graphs", rows, wide.generate(rows) if translates else [])
        self.origin = {"text": text.origin, "sha256": text.sha256, "sentences": len(rows)}
        self.expected = Expected(wide, judged)

    def best(self, before: Int8Scales, part: str = "", symmetric: bool = False) -> tuple[Int8Scales, Quality]:
        """Calibrate the matrices with `part` in their names; return the best scales and their quality.

        before, symmetric: as for `scales_of`.
        """
        sites, tried = {name: site for name, site in self.sites.items() if part in name}, []
        for percentile in PERCENTILES:
            scales = scales_of(sites, percentile, self.plan.config, before, self.origin, symmetric)
            narrow = self._int8(scales)
            tried.append((self.expected.agreement(narrow), scales, narrow))
        _, scales, narrow = max(tried, key=lambda each: each[0])  # the first of equals
        quality = self.expected.quality("int8", narrow, narrow)
        judged_as = {"judged_sentences": quality.sentences, "agreement": quality.agreement}
        return replace(scales, origin={**scales.origin, **judged_as}), quality

    def agreement(self, scales: Int8Scales) -> float:
        """Share of best tokens (or neighbours) equal to float32's with these scales."""
        return self.expected.agreement(self._int8(scales))

    def _int8(self, scales: Int8Scales) -> OnnxTransformer:
        return self._written(precisions=("int8",), int8_scales=scales)

    def _written(self, **changes: Any) -> OnnxTransformer:
        from export.runtime import OnnxTransformer

        folder = Path(mkdtemp(dir=self.place))
        self.write(replace(self.plan, **changes), folder)
        return OnnxTransformer(folder)


def calibration_text(
    checkpoint: Checkpoint, file: str | Path | None, log: Callable[[str], None]
) -> CalibrationText | None:
    """Return the text to calibrate on; None if there is none, or no tokenizer for it.

    file: given by the user, so UserError if it can't be used; None: the validation text of the checkpoint's run.
    """
    if file is None:
        try:
            text = _validation_text(checkpoint.folder.parent / "run.json")
        except UserError as error:
            log(f"int8: no fixed scales: the run's validation text can't be read: {error}")
            return None
        return None if checkpoint.tokenizer_path is None else text
    if checkpoint.tokenizer_path is None:
        raise UserError(f"{file}: {checkpoint.folder} has no tokenizer to read it with")
    lines, digest = read_text_lines(file)
    if not any(line.strip() for line in lines):
        raise UserError(f"{file}: holds no lines; give text as the model will read it")
    return CalibrationText(lines, None, Path(file).name, digest)


def _validation_text(record: Path) -> CalibrationText | None:
    """The validation text in a run's record; None if there is no record, or it names no text.

    Raises UserError if the text can't be read, or has changed since the run.
    """
    try:
        values = read_json(record)
        data, valid = values["recipe"]["data"], values["data"]["valid"]
        source, target, documents = data.get("valid_source"), data.get("valid_target"), data.get("valid_text")
        corpus, count, seed = data.get("corpus"), data["train_pairs"], values["recipe"]["training"]["seed"]
    except (UserError, LookupError, TypeError, AttributeError):
        return None
    if source is not None and target is not None:
        pairs = read_parallel(source, target)
        text = CalibrationText(pairs.source, pairs.target, Path(source).name, pairs.digests["source"])
        digest = valid.get("source")
    elif corpus is not None and len(built_in.languages(corpus)) == 1:
        _, texts = built_in.documents(corpus, seed)
        text = CalibrationText(texts.texts, None, f"{corpus}, validation", texts.digests["text"])
        digest = valid.get("text")
    elif corpus is not None:
        pairs = built_in.build(corpus, count, seed).valid
        text = CalibrationText(pairs.source, pairs.target, f"{corpus}, validation", pairs.digests["source"])
        digest = valid.get("source")
    elif documents is not None:
        texts, _ = read_documents(documents, data.get("documents"))
        text = CalibrationText(texts.texts, None, Path(documents).name, texts.digests["text"])
        digest = valid.get("text")
    else:
        return None
    if text.sha256 != digest:
        raise UserError(f"{text.origin}: is another text than the run's")
    return text
