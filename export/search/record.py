"""The record in a file with the search, its metadata: written from a plan, and the plan read back from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from export.package.plan import Plan
from export.precision.int8 import BY_ROW
from export.precision.table import IN_BLOCKS
from export.settings import ExportSettings
from mlx_transformer.core.checkpoint import Checkpoint, digests
from mlx_transformer.core.int8_scales import read_int8_scales
from mlx_transformer.generation.settings import NO_SHORTLIST, SHORTLIST, Settings

from .metadata import (
    ACTIVATIONS,
    ATTENTION,
    CONFIG,
    GENERATION,
    GIVEN,
    PRECISION,
    SCALES,
    SOURCE,
    TOKENIZER,
    VECTOR,
    int8_scales_of,
)


def settings_beside(plan: Plan, stem: str, text: bool = False) -> tuple[Settings, dict[str, Path]]:
    """Return how the model generates, as a file of this stem says it, and {name: source} of the file beside it that is
    named there. text: the file takes text, whose tokens have no shortlist."""
    settings = {name: value for name, value in plan.generation.items() if name != SHORTLIST}
    named = {} if text else {f"{stem}.{name}": file for name, file in plan.named.items()}
    return (settings | {SHORTLIST: next(iter(named))} if named else settings), named


def record(plan: Plan, generation: Settings, text: bool = False) -> dict[str, str]:
    """Return the metadata. generation: as `settings_beside` gives it."""
    (precision,) = plan.precisions
    layer, scales, embedding = plan.request.attention_layer, plan.int8_scales, plan.embedding
    config, source = json.dumps(plan.config.to_dict()), source_of(plan.checkpoint)
    if text and not plan.config.has_decoder:
        assert embedding is not None
        facts = {CONFIG: config, VECTOR: embedding.json()}
    else:
        facts = ({GENERATION: json.dumps(generation)} if generation else {}) | {CONFIG: config}
    facts |= {PRECISION: precision, SOURCE: source}
    facts |= {} if layer is None else {ATTENTION: str(layer)}
    facts |= {} if plan.tokenizer is None else {TOKENIZER: plan.tokenizer}
    facts |= {ACTIVATIONS: plan.activations} if precision in IN_BLOCKS else {}
    facts |= {SCALES: scales.json()} if precision == "int8" and scales.products else {}
    return facts | ({} if plan.shortlist is None else {GIVEN: json.dumps(plan.shortlist)})


def source_of(opened: Checkpoint) -> str:
    """Return the digests of the weights that a file is made from."""
    return " ".join(digests(opened).values())


def recorded_plan(opened: Checkpoint, metadata: Mapping[str, Any], file: Path) -> Plan:
    """Return the plan by which a checkpoint is exported as this file was. Errors as of a folder's."""
    precision = metadata[PRECISION]
    settings = ExportSettings(
        precision=[precision],
        activations=metadata.get(ACTIVATIONS),
        attention_layer=int(metadata[ATTENTION]) if ATTENTION in metadata else None,
        shortlist=_shortlist(metadata, file),
    )
    plan = Plan.of(opened, settings)
    if precision != "int8":
        return plan
    own = read_int8_scales(opened.folder, opened.config) or BY_ROW
    used = int8_scales_of(metadata, opened.config, file) or BY_ROW
    left = own.leaving(used.float32, opened.config)
    its_own = own.is_fixed and (used.origin == own.origin or used.products == left.products)
    return replace(plan, int8_scales=left if its_own else used)


def _shortlist(metadata: Mapping[str, str], file: Path) -> Path | str | None:
    given: Any = json.loads(metadata.get(GIVEN, "null"))
    if not isinstance(given, dict):
        return given and NO_SHORTLIST
    return file.with_name(json.loads(metadata[GENERATION])[SHORTLIST])
