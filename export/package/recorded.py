"""Read a package's plan back from its mlx_transformer.json.

From that plan `validate` makes the files around the graphs again (`around.py`) and compares them. Choices of the export
come from the record, everything else from the checkpoint. The record counts as true if the graphs agree; `validate`
checks both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from export.interface import CROSS_ATTENTION, DIMENSIONS, INPUTS_EMBEDS
from export.precision.int8 import BY_ROW
from export.precision.table import IN_BLOCKS
from export.settings import ExportSettings
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import Int8Scales, layers_of, read_int8_scales
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.generation.settings import NO_SHORTLIST

from .layers import Moved
from .plan import SHORTLIST_FILE, Plan
from .quality import LIMITS, Quality


def recorded_plan(opened: Checkpoint, folder: Path, values: Mapping[str, Any]) -> Plan:
    """Return the plan by which `folder` was exported from this checkpoint.

    values: the contents of its mlx_transformer.json. Raises UserError for a choice this model doesn't have;
    LookupError, TypeError, ValueError or AttributeError for a malformed record.
    """
    precisions = dict(values["precisions"])
    activations = next((entry["activations"] for name, entry in precisions.items() if name in IN_BLOCKS), None)
    shortlist = values.get("shortlist")
    settings = ExportSettings(
        target=values["target"],
        precision=list(precisions),
        activations=activations,
        attention_layer=values[CROSS_ATTENTION]["layer"] if CROSS_ATTENTION in values else None,
        inputs_embeds=values.get(INPUTS_EMBEDS) is True,
        dimensions=values.get(DIMENSIONS),
        shortlist=folder / SHORTLIST_FILE if isinstance(shortlist, Mapping) else shortlist and NO_SHORTLIST,
    )
    plan = Plan.of(opened, settings)
    if "int8" not in precisions:
        return plan
    return replace(plan, int8_scales=_int8_scales(opened, folder, precisions["int8"].get("calibration")))


def with_findings(plan: Plan, values: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return `record` with the export's own findings: versions, and the quality of lower precisions.

    values: the package's own record; malformed entries are left out.
    """
    precisions = {name: {**entry} for name, entry in record["precisions"].items()}
    for name, entry in precisions.items():
        known = values["precisions"][name]
        if name in LIMITS and _is_quality(name, known.get("quality")):
            entry["quality"] = known["quality"]
        if name == "int8" and _are_layers(known.get("layers"), plan.config):
            entry["layers"] = known["layers"]
    versions = values.get("versions")
    known = isinstance(versions, dict) and all(isinstance(each, str) for each in versions.values())
    return {**record, "precisions": precisions, "versions": versions if known else record["versions"]}


def _int8_scales(opened: Checkpoint, folder: Path, calibration: object) -> Int8Scales:
    """The checkpoint's own scales if the package records these, otherwise the package's calibrated scales."""
    own, used = (read_int8_scales(place, opened.config) or BY_ROW for place in (opened.folder, folder))
    if own.is_fixed and calibration == dict(own.origin):
        return own.leaving(used.float32, opened.config)
    return used


def _is_quality(precision: str, entry: Any) -> bool:
    try:
        quality = Quality(precision, **entry)
        shares = all(0 <= share <= 1 for share in (quality.agreement, quality.same))
        return shares and quality.sentences > 0 and isinstance(quality.text, str) and quality.to_dict() == entry
    except TypeError:
        return False


def _are_layers(entry: Any, config: TransformerConfig) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"text", "sentences", "all", "each"}:
        return False
    each = entry["each"]
    if not isinstance(each, dict) or not each.keys() <= layers_of(quantizable_shapes(config)).keys():
        return False
    keys = {field.name for field in fields(Moved)}
    return all(isinstance(moved, dict) and moved.keys() == keys for moved in (entry["all"], *each.values()))
