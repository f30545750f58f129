"""Which scales the activations of int8 get: fixed ones, where there are some and they keep the quality, or one a token.

    int8_scales.json of the checkpoint     its own, an imported model's
    --calibrate FILE                       from that text (`calibration.py`)
    the run's validation text              likewise, where the run's record names it and it hasn't changed

A text's even lines are calibrated on and its odd ones judged, as `quality.py` judges. The
percentile is taken whose best tokens are most often float32's; where even that is beyond the limits, each token has its
own scale.

An encoder alone has the second chance of fixed scales in attention alone, where it keeps nearly as many neighbours as
with a scale a token. Feed-forward nets are where a text's first token may have numbers six to ten times as large as
all others, which one scale for all can't hold; attention costs nothing to fix, and has half of the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

from export.precision.int8 import BY_ROW
from export.settings import ExportSettings
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.int8_scales import INT8_SCALES, Int8Scales, read_int8_scales
from mlx_transformer.data import built_in
from mlx_transformer.data.corpus import read_parallel, read_text_lines
from mlx_transformer.data.documents import read_documents
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_json
from mlx_transformer.system.watch import Progress, no_progress

from .calibration import observe, scales_of, whole_matrices
from .plan import Plan
from .quality import Expected, Quality, Text, rows_of

if TYPE_CHECKING:
    from export.runtime import OnnxTransformer

CALIBRATED, JUDGED = 300, 200
"""Most lines of each kind."""
PERCENTILES = (100.0, 99.9)
"""Tried, among the largest magnitudes of all tokens; 100: the largest one."""
ATTENTION = ".self_attention."
"""In the names of an encoder's matrices that may have fixed scales where not all of them can."""
MORE_LOST = 0.005
"""The share of neighbours that attention's fixed scales may lose more than scales a token."""


@dataclass(frozen=True)
class CalibrationText(Text):
    """The lines of a whole file, and its digest."""

    sha256: str

    def parts(self) -> tuple[list[str], Text]:
        """Return what is calibrated on, and what is judged."""
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
    """Return the plan with its fixed scales. `write` writes a plan's package into an empty folder. `log` is called
    with a line on where they are from, or why there are none. Raises `UserError` where they are asked for and can't
    be had."""
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
    encodes = plan.config.architecture == "encoder"  # its products have many rows: one scale a matrix gains nothing
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
    """A model in float32 that has read a text, and the text's other lines, on which int8 is judged with its scales."""

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
        """Return scales from the text for the matrices with `part` in their names, and what the model does with them.
        `before` and `symmetric`: as for `calibration.scales_of`."""
        sites, tried = {name: site for name, site in self.sites.items() if part in name}, []
        for percentile in PERCENTILES:
            scales = scales_of(sites, percentile, self.plan.config, before, self.origin, symmetric)
            narrow = self._int8(scales)
            tried.append((self.expected.agreement(narrow), scales, narrow))
        _, scales, narrow = max(tried, key=lambda each: each[0])  # of equal ones the first
        quality = self.expected.quality("int8", narrow, narrow)
        judged_as = {"judged_sentences": quality.sentences, "agreement": quality.agreement}
        return replace(scales, origin={**scales.origin, **judged_as}), quality

    def agreement(self, scales: Int8Scales) -> float:
        """Return the share of best tokens, or of neighbours, that are float32's with such scales."""
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
    """Return the text to calibrate on; None where there is none, or no tokenizer to read it."""
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
    """Return the validation text that a run's record names; None if it names none, or there is no such record.
    `UserError` for one that can't be read, or has changed since."""
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
