"""The scales of Marian's int8: one multiplier for each matrix and one for what comes to it, 127 steps on either side.

Our own int8 may have a scale for each output and uses the signs that a product doesn't have; Marian's files hold
neither. So scales for them are taken from a text by themselves, and judged as our own are, on integers that are the
file's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from export.settings import ExportSettings
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.int8_scales import Int8Scales, ProductScales, read_int8_scales
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.families.marian_files.conversion import multiplier

from .fixed_scales import Trial, calibration_text
from .plan import Plan
from .write import write_package


def marian_scales(
    checkpoint: str | Path, calibrate: str | Path | None = None, log: Callable[[str], None] = lambda _: None
) -> Int8Scales | None:
    """Return the scales with which a checkpoint is written as Marian's int8; None where there is no text.

    They are those of its int8_scales.json, or from the text `calibrate`, or else from the validation text of its run.
    `log` is called with a line on what they do. `UserError` for text that can't be read, and a model without a
    tokenizer to read it with.
    """
    opened = open_checkpoint(checkpoint)
    own = read_int8_scales(opened.folder, opened.config)
    if own is not None and calibrate is None:
        return own
    text = calibration_text(opened, calibrate, log)
    if text is None:
        return None
    plan = Plan.of(opened.folder, ExportSettings(precision=["int8"]))
    # The multipliers of matrices as they are written: each by its largest magnitude.
    names = quantizable_shapes(opened.config)
    before = own or Int8Scales({name: ProductScales(weight=multiplier(opened.tensor(name))) for name in names})
    with TemporaryDirectory() as place:
        scales, quality = Trial(plan, text, write_package, Path(place)).best(before, symmetric=True)
    log(f"int8: scales from {scales.origin['sentences']} lines of {text.origin}; on others: {quality}")
    return scales
