"""Scales for Marian's int8 files: a multiplier per matrix and another for its input, 127 steps on either side of zero.

Our own int8 may have a scale per output, and may use the sign of a product's input (255 steps above zero). Marian's
files hold neither, so their scales are calibrated separately, and judged on the file's own integers.
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
    """Return the scales for writing a checkpoint as Marian's int8; None without a text to calibrate on.

    They come from the checkpoint's int8_scales.json unless `calibrate` names a text, then from that text; without
    either, from the validation text of the checkpoint's run. `log` gets a line with the result. Raises UserError if the
    text can't be read, or if the model has no tokenizer for it.
    """
    opened = open_checkpoint(checkpoint).widened()
    own = read_int8_scales(opened.folder, opened.config)
    if own is not None and calibrate is None:
        return own
    text = calibration_text(opened, calibrate, log)
    if text is None:
        return None
    plan = Plan.of(opened.folder, ExportSettings(precision=["int8"]))
    # The file stores each matrix with a multiplier from its largest magnitude, so the trial has to as well.
    names = quantizable_shapes(opened.config)
    before = own or Int8Scales({name: ProductScales(weight=multiplier(opened.tensor(name))) for name in names})
    with TemporaryDirectory() as place:
        scales, quality = Trial(plan, text, write_package, Path(place)).best(before, symmetric=True)
    log(f"int8: scales from {scales.origin['sentences']} lines of {text.origin}; on others: {quality}")
    return scales
