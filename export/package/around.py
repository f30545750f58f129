"""The files of a package around its graphs, made from the plan only: `write.py` writes them, and `validate` makes them
again from the checkpoint and compares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from export.interface import LISTED_CPU, MODEL, PROMPT_CPU, ROWS_CPU
from export.precision.table import IN_BLOCKS, PRECISIONS, blocks_operators, prompts_in, takes_rows
from mlx_transformer.core.checkpoint import WEIGHTS, Checkpoint, digests
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.core.int8_scales import INT8_SCALES
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.core.tokenizer_files import JOINT, tokenizer_files
from mlx_transformer.families.folder import tokenizer_config
from mlx_transformer.families.sentence_folder import dense_weights, sentence_files
from mlx_transformer.generation.settings import CHAT_TEMPLATES, DEFAULT, settings_text
from mlx_transformer.system.files import read_bytes
from mlx_transformer.system.machine import versions
from mlx_transformer.system.tensors import tensor_bytes

from . import consumers
from .plan import Plan

FORMAT = 1
LARGEST_SHORTLIST = 1 << 31
"""Most bytes of a shortlist file."""


def files_around(plan: Plan, external: Sequence[str]) -> dict[str, bytes]:
    """Return {name: contents} of all files except the graphs, their data, the manifests and the model card.

    external: graph files with a data file of their own name.
    """
    settings, embedding, config = plan.generation, plan.embedding, plan.config
    default = "float32" if "float32" in plan.precisions else plan.precisions[0]
    values: dict[str, Any] = consumers.configs(config, list(external), PRECISIONS[default].dtype, settings)
    if MODEL not in plan.written.graph_names(config):
        values.pop("genai_config.json", None)
    files = {name: read_bytes(file, LARGEST_SHORTLIST) for name, file in plan.named.items()}
    files |= {name: text.encode() for name, text in settings_text(settings).items()}
    if embedding is not None:
        files |= _embedding(embedding)
        values |= sentence_files(embedding, config.d_model, config.max_positions)
    for name, text in ({} if plan.tokenizer is None else tokenizer_files(plan.tokenizer)).items():
        files[name] = text.encode()
        if name == JOINT:
            values["tokenizer_config.json"] = tokenizer_config(config, text, embedding, settings) | _templates(settings)
    values[ONNX_CONFIG] = record(plan)
    if plan.int8_scales.products and "int8" in plan.precisions:
        files[INT8_SCALES] = plan.int8_scales.json().encode()
    return files | {name: json_bytes(each) for name, each in values.items()}


def record(plan: Plan) -> dict[str, Any]:
    """The contents of mlx_transformer.json: the model, the digests of its source, and every choice of the export."""
    target, config = plan.target, plan.config
    instead = {} if plan.written is target else {"target": plan.written.name, "why": target.supports(config)}
    return {
        "format": FORMAT,
        "config": config.to_dict(),
        "source": source_of(plan.checkpoint),
        **_adapter(plan.checkpoint),
        "target": target.name,
        **({"graphs": instead} if instead else {}),
        **plan.request.written(),
        **({} if plan.shortlist is None else {"shortlist": plan.shortlist}),
        "precisions": {
            name: {"suffix": PRECISIONS[name].suffix, **_arithmetic(plan, name)} for name in plan.precisions
        },
        "versions": versions(),
    }


def graphs_of(plan: Plan, precision: str) -> dict[str, list[str]]:
    """{data file: graphs that use it}, both names without the precision's suffix."""
    left_out = [] if takes_rows(precision) else [ROWS_CPU, LISTED_CPU]
    left_out += [] if prompts_in(precision, plan.activations) else [PROMPT_CPU]
    owners = plan.target.data_files(plan.config)
    return {owner: [name for name in names if name not in left_out] for owner, names in owners.items()}


def source_of(opened: Checkpoint) -> dict[str, dict[str, str]]:
    """Digests of the checkpoint's weights."""
    return {name: {"sha256": digest} for name, digest in digests(opened).items()}


def json_bytes(values: Any) -> bytes:
    """Format a JSON file of a package."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _templates(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The chat templates where transformers.js looks for them, which doesn't read chat_template.jinja."""
    templates = settings.get(CHAT_TEMPLATES, {})
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    return {"chat_template": templates[DEFAULT] if [*templates] == [DEFAULT] else listed} if templates else {}


def _embedding(embedding: TextEmbedding) -> dict[str, bytes]:
    """embedding.json and its tensors for this project, and dense weights for sentence-transformers."""
    files = {name: text.encode() for name, text in embedding.texts().items()}
    files |= {name: tensor_bytes(arrays) for name, arrays in embedding.tensors().items()}
    dense = dense_weights(embedding)
    return files | {f"{name}/{WEIGHTS}": tensor_bytes(arrays, {"format": "pt"}) for name, arrays in dense}


def _arithmetic(plan: Plan, precision: str) -> dict[str, Any]:
    if precision == "int8":
        scales = plan.int8_scales
        fixed = {"scales": "fixed", "calibration": {**scales.origin}} if scales.is_fixed else {}
        return {**fixed, **({"float32": scales.float32} if scales.float32 else {})}
    if precision not in IN_BLOCKS:
        return {}
    blocks = blocks_operators(precision, plan.target.lowering, plan.activations)
    return {"activations": plan.activations, "blocks": blocks}


def _adapter(opened: Checkpoint) -> dict[str, Any]:
    if opened.adapter is None:
        return {}
    c = opened.adapter.config
    facts = {"kind": c.kind, "rank": c.rank, "alpha": c.alpha, "linear_maps": len(c.targets)}
    return {"adapter": {**facts, "beside_integers": len(opened.adapted_integers)}}
