"""Adapters of mlx-lm: LoRA and DoRA, and tensors of its full fine-tuning.

adapter_config.json has the arguments of the run: fine_tune_type, num_layers (the last blocks; -1: all), lora_parameters
(rank, scale, dropout, keys). adapters.safetensors changes the model's tensors. For a linear map of weight W (O, D):

    PATH.lora_a (D, R), PATH.lora_b (R, O)    W + scale (lora_a lora_b)^T
    PATH.m (O,), DoRA only                    m (W + ...) / ||W + ...||, row by row

An embedding's lora_a is (O, R), its lora_b (R, D). `PATH.weight` and others stand in place of the model's (full).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.adapter import AdapterConfig
from mlx_transformer.core.folders import MLX_ADAPTER, PEFT_CONFIG
from mlx_transformer.system.errors import refusal
from mlx_transformer.system.files import read_object
from mlx_transformer.system.tensors import stored_tensors

LORA, DORA, FULL = "lora", "dora", "full"
TABLES = ("embed_tokens", "wte", "wpe")
"""Names of embeddings, whose adapters are transposed."""
LINEAR = {"lora_a": "a", "lora_b": "b", "m": "magnitude"}
EMBEDDING = {"lora_a": "embedding_a", "lora_b": "embedding_b", "m": "magnitude"}

Parts = dict[str, dict[str, NDArray]]


def read_mlx_adapter(path: Path) -> tuple[dict[str, Any], Parts, dict[str, NDArray]]:
    """(adapter_config.json in PEFT's words, the arrays of each changed module, tensors in place of the base's)

    Raises `UserError` for damage and for other kinds of adapters.
    """
    config = read_object(path / PEFT_CONFIG)
    kind, settings = config.get("fine_tune_type", LORA), config.get("lora_parameters")
    scale, rank = (settings.get(key) if isinstance(settings, dict) else None for key in ("scale", "rank"))
    problems = [] if kind in (LORA, DORA, FULL) else [f"fine_tune_type {kind!r:.40} is none of {LORA}, {DORA}, {FULL}"]
    alpha = scale * rank if isinstance(scale, int | float) and isinstance(rank, int) and rank > 0 else None
    if kind != FULL and alpha is None:
        problems.append("lora_parameters must have a rank and a scale, which are numbers")
    parts, replaced = Parts(), dict[str, NDArray]()
    for name, tensor in stored_tensors(path / MLX_ADAPTER).items():
        module, _, end = name.rpartition(".")
        if end not in LINEAR:
            replaced[name] = np.asarray(tensor, np.float32)
        else:
            kinds = EMBEDDING if module.rpartition(".")[2] in TABLES else LINEAR
            parts.setdefault(module, {})[kinds[end]] = np.asarray(tensor, np.float32).T
    problems += [
        f"{module} has {' and '.join(sorted(arrays))} alone" for module, arrays in parts.items() if len(arrays) < 2
    ]
    problems += [f"{name} is no part of a {kind} adapter" for name in replaced if kind != FULL]
    problems += [f"{name} is no part of full fine-tuning" for name in parts if kind == FULL]
    if problems:
        raise refusal(f"{path}: can't be read", problems, path)
    words = {"base_model_name_or_path": config.get("model"), "use_dora": kind == DORA}
    return words if alpha is None else {**words, "lora_alpha": alpha}, parts, replaced


def mlx_files(
    adapter: AdapterConfig, changes: Mapping[str, tuple[NDArray, NDArray, NDArray | None]], layers: int
) -> tuple[dict[str, Any], dict[str, NDArray]]:
    """adapter_config.json, without the model's name, and the tensors of an adapter of ours in mlx-lm's format.

    changes: of the modules of a model with so many `layers` (`peft.changes_of_modules`). Layers in which a module has
    no change get one of zeros from mlx-lm.
    """
    rank = max(len(a) for a, _, _ in changes.values())
    tensors: dict[str, NDArray] = {}
    for module, (a, b, magnitude) in changes.items():
        wider = ((0, rank - len(a)), (0, 0))
        tensors |= {f"{module}.lora_a": np.pad(a, wider).T, f"{module}.lora_b": np.pad(b.T, wider)}
        tensors |= {} if magnitude is None else {f"{module}.m": magnitude}
    places = [match for module in changes if (match := re.search(r"\.(\d+)\.(.+)", module))]
    return {
        "fine_tune_type": adapter.kind,
        "num_layers": layers - min(int(place[1]) for place in places),
        "lora_parameters": {
            "rank": rank,
            "scale": adapter.factor,
            "dropout": adapter.dropout,
            "keys": sorted({place[2] for place in places}),
        },
    }, tensors
