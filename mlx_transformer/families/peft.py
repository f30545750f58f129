"""Adapters of PEFT (https://github.com/huggingface/peft) and mlx-lm: read and applied to their published base models;
ours written in their formats. Kinds: LoRA, rsLoRA, DoRA.

PEFT: adapter_config.json names the base and says how adapter_model.safetensors changes its tensors. For a linear map of
weight W (O, D), with A (R, D), B (O, R) and s = alpha / R, or alpha / sqrt(R) in rsLoRA:

    W + s B A                              LoRA
    m (W + s B A) / ||W + s B A||          DoRA, row by row, with the magnitudes m (O,)

Other tensors in the file, such as a classifier's, replace the base's (`modules_to_save`).

A family may store several of our matrices as a single matrix, e.g. ModernBERT's query, key and value. Their changes are
then written as one: the rows of A are stacked, B is block-diagonal.

mlx-lm: adapter_config.json has the arguments of the run: fine_tune_type, num_layers (the last blocks; -1: all),
lora_parameters (rank, scale, dropout, keys). Its adapters.safetensors:

    PATH.lora_a (D, R), PATH.lora_b (R, O)    W + scale (lora_a lora_b)^T
    PATH.m (O,), DoRA only                    m (W + ...) / ||W + ...||, row by row

An embedding's lora_a is (O, R), its lora_b (R, D). With fine_tune_type "full", tensors such as PATH.weight replace the
base's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.adapter import MAGNITUDE, A, Adapter, AdapterConfig, B, WeightDelta
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import MLX_ADAPTER, PEFT_CONFIG, Place
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.positions import WRITES
from mlx_transformer.system.errors import UserError, first_of, refusal
from mlx_transformer.system.files import read_object
from mlx_transformer.system.tensors import stored_tensors
from mlx_transformer.system.torch_files import stored_torch_tensors

from .engine import EMBEDDINGS, At, Family, Published, channel_order, config_of, written_config
from .hub import find_model

LORA, DORA, FULL = "lora", "dora", "full"
TABLES = ("embed_tokens", "wte", "wpe")
"""Names of embeddings, whose adapters are transposed."""
LINEAR = {"lora_a": "a", "lora_b": "b", "m": "magnitude"}
EMBEDDING = {"lora_a": "embedding_a", "lora_b": "embedding_b", "m": "magnitude"}

Parts = dict[str, dict[str, NDArray]]


def read_mlx_adapter(path: Path) -> tuple[dict[str, Any], Parts, dict[str, NDArray]]:
    """Read an adapter of mlx-lm: (adapter_config.json with PEFT's keys, {module: its arrays}, tensors that replace the
    base's). Raises `UserError` if it is damaged or of another kind.
    """
    config = read_object(path / PEFT_CONFIG)
    kind, settings = config.get("fine_tune_type", LORA), config.get("lora_parameters")
    scale, rank = (settings.get(key) if isinstance(settings, dict) else None for key in ("scale", "rank"))
    problems = [] if kind in (LORA, DORA, FULL) else [f"fine_tune_type {kind!r:.40} is not {LORA}, {DORA} or {FULL}"]
    alpha = scale * rank if isinstance(scale, int | float) and isinstance(rank, int) and rank > 0 else None
    if kind != FULL and alpha is None:
        problems.append("lora_parameters must have rank and scale, both numbers")
    parts, replaced = Parts(), dict[str, NDArray]()
    for name, tensor in stored_tensors(path / MLX_ADAPTER).items():
        module, _, end = name.rpartition(".")
        if end not in LINEAR:
            replaced[name] = np.asarray(tensor, np.float32)
        else:
            kinds = EMBEDDING if module.rpartition(".")[2] in TABLES else LINEAR
            parts.setdefault(module, {})[kinds[end]] = np.asarray(tensor, np.float32).T
    problems += [
        f"{module} has only {' and '.join(sorted(arrays))}" for module, arrays in parts.items() if len(arrays) < 2
    ]
    problems += [f"{name} doesn't belong to fine_tune_type {kind}" for name in (parts if kind == FULL else replaced)]
    if problems:
        raise refusal(f"{path}: can't be read", problems, path)
    words = {"base_model_name_or_path": config.get("model"), "use_dora": kind == DORA}
    return words if alpha is None else {**words, "lora_alpha": alpha}, parts, replaced


def mlx_files(
    adapter: AdapterConfig, changes: Mapping[str, tuple[NDArray, NDArray, NDArray | None]], layers: int
) -> tuple[dict[str, Any], dict[str, NDArray]]:
    """Convert an adapter of ours to mlx-lm's format: adapter_config.json without the model's name, and the tensors.

    changes: see `changes_of_modules`. layers: the model's number of layers. The format has the same modules in each of
    the last `num_layers` layers; mlx-lm fills in zeros for those without a tensor.
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


WEIGHTS = "adapter_model.safetensors"
OLD_WEIGHTS = "adapter_model.bin"
PREFIX = "base_model.model."
ROWS, BIAS = "rows", "final_logits_bias"
PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "lora_embedding_A": "embedding_a",
    "lora_embedding_B": "embedding_b",
    "token_adapter.trainable_tokens_delta": ROWS,
}
"""{end of a tensor's name in the file: key in `PublishedAdapter.parts`}"""
HEADS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
"""{PEFT's task: end of the name of the model's class in transformers}"""
TASKS = {
    "encoder-decoder": "SEQ_2_SEQ_LM",
    "decoder": "CAUSAL_LM",
}
"""{architecture: PEFT's task}; encoders have no entry: none of PEFT's tasks keeps their base's head."""
CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Values of init_lora_weights that change the base's weights, too."""
KNOWN = re.compile(
    r"(task|peft)_(type|version)|auto_mapping|base_model\w*|revision|inference_mode|r|(target|exclude)_modules"
    r"|modules_to_save|lora_(alpha|dropout)|fan_in_fan_out|bias|use_(rslora|dora)|layers_\w+|(rank|alpha)_pattern"
    r"|trainable_token_indices|ensure_weight_tying"
    r"|init_lora_weights|(loftq|eva|corda|lora_ga|velora|runtime)_config|megatron_core|qalora_group_size"
)
"""Keys of adapter_config.json that are read, follow from the tensors, or matter only in training."""


@dataclass(frozen=True)
class PublishedAdapter:
    """The contents of an adapter's folder, PEFT's or mlx-lm's."""

    path: Path
    config: Mapping[str, Any]
    """The contents of adapter_config.json."""
    parts: Mapping[str, Mapping[str, NDArray]]
    """{module of the base: {"a", "b", "magnitude", ...: array}}"""
    replaced: Mapping[str, NDArray]
    """Tensors that replace the base's, by name."""
    of_mlx_lm: bool = False
    """Written by mlx-lm; modules have its names."""

    @property
    def base(self) -> Path:
        """The base's folder: base_model_name_or_path as a path, a path in the adapter's folder, or a name on the Hub.

        Raises `UserError` if it is none of these.
        """
        name = self.config.get("base_model_name_or_path")
        if not name or not isinstance(name, str):
            key = "model" if self.of_mlx_lm else "base_model_name_or_path"
            raise UserError(f"{self.path / PEFT_CONFIG}: {key} names no base model; write its folder there")
        if (beside := self.path / name).is_dir() or Path(name).exists():
            return Path(name) if Path(name).exists() else beside
        revision = self.config.get("revision")
        found, why = Path(name), f"no such folder, here or in {self.path}"
        try:
            found = find_model(name, revision if isinstance(revision, str) else None).folder
        except UserError as error:
            why = str(error).removeprefix(f"{name}: ")
        if not found.exists():
            raise UserError(
                f"{self.path / PEFT_CONFIG}: its base is {name}: {why}; merge BASE ADAPTER takes any folder"
            )
        return found

    def applied(self, base: Published, family: Family) -> tuple[Published, str]:
        """Merge the adapter into its base; returns the merged model, and a note that lists the changes.

        Raises `UserError` with all tensors that are missing in the base or have another shape there.
        """
        tensors, left = (dict(base.tensors), dict[str, bool]()) if self.of_mlx_lm else self._apart(base, family)
        places = family.places(config_of(family, base.config, base.generation, base.config_file)).values()
        transposed = {name for names, at in places if at.transposed for name in names}
        problems: list[str] = []
        for name in self.replaced.keys() - left.keys():
            tensors[self._name(name, tensors, family) or name] = self.replaced[name]
        for module in sorted(self.parts):
            parts, name = self.parts[module], self._name(f"{module}.weight", tensors, family)
            if f"{module}.weight" in left:
                continue
            if name is None:
                problems.append(f"the base has no {module}")
                continue
            try:
                tensors[name] = self._changed(module, parts, tensors[name], name in transposed)
            except (ValueError, IndexError, TypeError):
                shapes = ", ".join(f"{part} {array.shape}" for part, array in parts.items())
                problems.append(f"{module}: {shapes} don't fit the base's {tuple(tensors[name].shape)}")
        if problems:
            raise refusal(f"{self.path}: doesn't fit its base {base.path}", problems, self.path)
        ranks = sorted({array.shape[0] for parts in self.parts.values() for n, array in parts.items() if n[-1] == "a"})
        kind = "DoRA" if self.config.get("use_dora") else "rsLoRA" if self.config.get("use_rslora") else "LoRA"
        ranks_said = f" of rank {', '.join(map(str, ranks))}" if ranks else ""
        replaced = sorted(self.replaced.keys() - {name for name, is_read in left.items() if not is_read})
        own = f"{len(replaced)} tensors of its own ({first_of(replaced, ', ')})"
        changes = [f"{kind}{ranks_said} of {len(self.parts)} matrices"] if self.parts else []
        unread = [name for name, is_read in left.items() if not is_read]
        changes += [f"nothing of {first_of(sorted(unread), ', ')}, which PEFT's model doesn't read"] if unread else []
        note = f"merged into {base.path}: {', and '.join([*changes, *([own] if replaced else [])])}"
        return replace(base, tensors=tensors, config=self._with_head(base, family, tensors)), note

    def _apart(self, base: Published, family: Family) -> tuple[dict[str, Any], dict[str, bool]]:
        """Untie embeddings as PEFT does: (the base's tensors, {changed tensor that no layer reads: is its value used}).

        If the adapter changes one of the modules that share an embedding, PEFT gives each module its own tensor, unless
        ensure_weight_tying is set. An embedding saved whole, but not by modules_to_save, is for all modules.
        """
        tensors, left = dict(base.tensors), dict[str, bool]()
        names_saved = tuple(self.config.get("modules_to_save") or ())
        saved = {n for n in self.replaced if names_saved and n.removesuffix(".weight").endswith(names_saved)}
        own = saved | {f"{module}.weight" for module in self.parts}
        for names, at in self._tables(base, family):
            group = [f"{name}.weight" for name in (at.name, *at.copies)]
            present = [name for name in names if name in tensors]
            changed = [name for name in {*own, *self.replaced} if self._name(name, dict.fromkeys(names), family)]
            if len(group) == 1 or not present or not changed:
                continue
            if len(changed) > 1 and any(ROWS in self.parts.get(name.removesuffix(".weight"), ()) for name in changed):
                modules = first_of(sorted(changed), ", ")
                raise UserError(f"{self.path}: trainable_token_indices changes rows of {modules}: merge it with PEFT")
            whole = [name for name in changed if name in self.replaced.keys() - saved]
            tied = self.replaced[whole[0]] if whole else tensors[present[0]]
            for name in present:
                del tensors[name]
            if own.isdisjoint(changed) or (len(changed) == 1 and self._keeps_tied(changed[0])):
                tensors[changed[0]] = self.replaced.get(changed[0], tied)
            else:
                tensors |= dict.fromkeys(group, tied)
                if len(group) > 2:  # in an encoder-decoder model no layer reads the shared tensor itself
                    del tensors[group[0]]
                    left |= {name: name in whole for name in changed if self._name(name, {group[0]: tied}, family)}
        return tensors, left

    def _keeps_tied(self, name: str) -> bool:
        """Whether a change of this module changes all modules tied to it."""
        module = name.removesuffix(".weight")
        ensured = self.config.get("ensure_weight_tying") and module.endswith(("embed_tokens", "lm_head"))
        return bool(ensured) or ROWS in self.parts.get(module, ())

    def _changed(self, module: str, parts: Mapping[str, NDArray], weight: Any, transposed: bool) -> NDArray:
        """Merge the module's change into its weight, in float64 and rounded once."""
        weight = np.array(weight)
        if ROWS in parts:
            ids = self._tokens(module)
            if min(ids) < 0 or len(ids) != len(parts[ROWS]):
                raise ValueError
            weight[ids] = parts[ROWS]
            return weight
        a, b = (parts[name] for name in (("embedding_a", "embedding_b") if "embedding_a" in parts else ("a", "b")))
        scale = self._scale(module, a.shape[0])
        turned = "embedding_a" in parts or transposed
        weight = weight.T if turned else weight
        if (b.shape[0], a.shape[1]) != weight.shape:
            raise ValueError
        magnitude = parts["magnitude"].reshape(-1) if "magnitude" in parts else None
        changed = WeightDelta(scale, a, b, magnitude).of(weight).astype(weight.dtype)
        return changed.T if turned else changed

    def _tokens(self, module: str) -> list[int]:
        """Ids of the embedding's rows in the adapter, in its order."""
        ids: Any = self.config.get("trainable_token_indices") or ()
        return next((ids[key] for key in ids if module.endswith(key)), []) if isinstance(ids, dict) else list(ids)

    def _scale(self, module: str, rank: int) -> float:
        patterns = self.config.get("alpha_pattern") or {}
        own = (value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
        alpha = float(next(own, self.config.get("lora_alpha", rank)))
        return alpha / (rank**0.5 if self.config.get("use_rslora") else rank)

    def as_ours(self, family: Family, config: TransformerConfig, base: str) -> Adapter:
        """Convert to an adapter of ours. base: SHA-256 of the base checkpoint's weights.

        Raises `UserError` if it changes anything but linear maps of the layers.
        """
        rank = max((len(parts["a"]) for parts in self.parts.values() if "a" in parts), default=1)
        factor = next((self._scale(module, len(p["a"])) for module, p in self.parts.items() if "a" in p), 1.0)
        arrays, left, shapes = dict[str, NDArray](), {*self.parts, *self.replaced}, parameter_shapes(config)
        for ours, (names, at) in family.places(config).items():
            module = next((m for name in names if (m := name.removesuffix(".weight")) in self.parts), None)
            if module is None or "a" not in (parts := self.parts[module]):
                continue
            left.discard(module)
            path, first = ours.removesuffix(".weight"), at.rows[0] if at.rows else 0
            rows, wider = slice(first, first + shapes[ours][0]), ((0, rank - len(parts["a"])), (0, 0))
            b = parts["b"][rows] * np.float32(self._scale(module, len(parts["a"])) / factor)
            arrays |= {f"{path}.{A}": np.pad(parts["a"], wider), f"{path}.{B}": np.pad(b, wider[::-1])}
            if "magnitude" in parts:
                arrays[f"{path}.{MAGNITUDE}"] = parts["magnitude"].reshape(-1)[rows]
        if left or channel_order(family, config) is not None:
            which = first_of(sorted(left), ", ") or "channels in another order"
            raise UserError(f"{self.path}: can't keep {which} beside integers; merge it without --keep-adapter")
        kind = "dora" if self.config.get("use_dora") else "lora"
        targets = tuple(name.removesuffix(f".{A}") for name in arrays if name.endswith(f".{A}"))
        settings = AdapterConfig(kind=kind, rank=rank, alpha=factor * rank, base=base, targets=targets)
        return Adapter(settings, arrays)

    @staticmethod
    def _name(name: str, tensors: Mapping[str, Any], family: Family) -> str | None:
        """The name in the base's file, with or without the family's prefix; None if it has no such tensor."""
        names = (name, name.removeprefix(family.prefix), family.prefix + name)
        return next((each for each in names if each in tensors), None)

    @staticmethod
    def _tables(base: Published, family: Family) -> list[tuple[list[str], At]]:
        """Places of the embeddings and of the vocabulary's classifier."""
        places = family.places(config_of(family, base.config, base.generation, base.config_file))
        return [places[ours] for ours in EMBEDDINGS if ours in places]

    def _with_head(self, base: Published, family: Family, tensors: dict[str, Any]) -> dict[str, Any]:
        """config.json of the model that the adapter was trained in.

        PEFT stores neither the head nor the size of the vocabulary: they follow from the task and the tensors. Pads the
        classifier's bias in `tensors` to a larger vocabulary.
        """
        config: dict[str, Any] = dict(base.config)
        tables = [name for names, _ in self._tables(base, family) for name in names]
        saved = (array for name, array in self.replaced.items() if self._name(name, dict.fromkeys(tables), family))
        if (table := next(saved, None)) is not None and not self.of_mlx_lm:
            config |= {key: len(table) for key in ("vocab_size", "decoder_vocab_size") if key in config}
            if (bias := tensors.get(BIAS)) is not None:  # as in transformers, new tokens have a bias of 0
                tensors[BIAS] = np.pad(np.asarray(bias), ((0, 0), (0, max(0, len(table) - bias.shape[-1]))))
        end = HEADS.get(str(self.config.get("task_type")))
        classes = config.get("architectures") or [""]
        if end is None or not self.replaced or str(classes[0]).endswith(end):
            return config
        begin = re.sub(r"(For[A-Z]\w+|LMHeadModel|Model)$", "", str(classes[0]))
        rows = [len(array) for name, array in self.replaced.items() if name.endswith(("weight", "bias"))]
        labels = {str(i): f"LABEL_{i}" for i in range(min(rows, default=2))}  # as transformers calls them
        numbers = {name: int(i) for i, name in labels.items()}
        return {**config, "architectures": [begin + end], "id2label": labels, "label2id": numbers}


def read_peft(path: Path) -> PublishedAdapter | None:
    """Read the adapter of PEFT or mlx-lm in a folder; None if it holds none.

    Raises `UserError` if it is damaged, or neither LoRA, rsLoRA nor DoRA.
    """
    if Place.of(path).what != "a published adapter":
        return None
    if (path / MLX_ADAPTER).is_file():
        return PublishedAdapter(path, *read_mlx_adapter(path), of_mlx_lm=True)
    config = read_object(path / PEFT_CONFIG)
    kind = config.get("peft_type")
    problems = [] if kind == "LORA" else [f"peft_type {kind!r:.40}; supported: LORA (LoRA, rsLoRA, DoRA)"]
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(CHANGED_BASE):
        problems.append(f"init_lora_weights {start!r:.40} changed the base, too: merge it with PEFT")
    problems += [
        f"{key}={value!r:.40} is not supported: merge it with PEFT (merge_and_unload)"
        for key, value in config.items()
        if value and not KNOWN.fullmatch(key)
    ]
    patterns = config.get("alpha_pattern") or {}
    alphas = [config.get("lora_alpha", 1), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if not all(isinstance(alpha, int | float) for alpha in alphas):
        problems.append("lora_alpha must be a number, alpha_pattern an object of numbers")
    try:
        list(map(re.compile, patterns))
    except (re.error, TypeError):
        problems.append(f"alpha_pattern {patterns!r:.60}: a key is no regular expression")
    saved = config.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        problems.append(f"modules_to_save={saved!r:.40} is no list of names")
    if problems:
        raise refusal(f"{path / PEFT_CONFIG}: can't be read", problems, path)
    file = path / WEIGHTS
    stored = stored_tensors(file) if file.is_file() else stored_torch_tensors(path / OLD_WEIGHTS)
    parts: dict[str, dict[str, NDArray]] = {}
    replaced: dict[str, NDArray] = {}
    for name, tensor in stored.items():
        own = name.removeprefix(PREFIX)
        end = next((end for end in PARTS if own.endswith(f".{end}")), None)
        if end is not None:
            parts.setdefault(own.removesuffix(f".{end}"), {})[PARTS[end]] = np.asarray(tensor, np.float32)
        elif ".lora_" in own:
            problems.append(f"{own} is an unsupported tensor")
        else:
            replaced[own.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = np.asarray(tensor)
    for module, arrays in parts.items():
        if not ({"a", "b"} <= arrays.keys() or arrays.keys() in ({"embedding_a", "embedding_b"}, {ROWS})):
            problems.append(f"{module} has only {' and '.join(sorted(arrays))}")
    if problems:
        raise refusal(f"{path}: can't be read", problems, path)
    return PublishedAdapter(path, config, parts, replaced)


Change = tuple[NDArray, NDArray, NDArray | None]
"""Change of a matrix: A (R, D), B (O, R), and DoRA's magnitudes (O,) or None."""


def changes_of_modules(
    adapter: Adapter, family: Family, config: TransformerConfig, weights: Mapping[str, Any]
) -> dict[str, Change]:
    """Convert an adapter of ours to changes of a family's matrices: {module: change}, still to be scaled by its factor.

    weights: the base's, in our names.
    """
    usual, of_ours = adapter.config.rank, dict(adapter.arrays)
    if (order := channel_order(family, config)) is not None:
        for name, array in of_ours.items():
            if name.endswith("lora_a") != name.rpartition(".")[0].endswith(WRITES):
                of_ours[name] = array[:, order] if name.endswith("lora_a") else array[order]
    reordered = Adapter(adapter.config, of_ours)
    joint: dict[str, dict[int, str]] = {}
    for ours, (names, at) in family.places(config).items():
        joint.setdefault(names[0].removesuffix(".weight"), {})[at.rows[0] if at.rows else 0] = ours
    changes = dict[str, Change]()
    for module, parts in joint.items():
        deltas = {i: delta for i, ours in sorted(parts.items()) if (delta := reordered.delta(ours)) is not None}
        if not deltas:
            continue
        b = np.zeros((sum(weights[ours].shape[0] for ours in parts.values()), usual * len(deltas)), np.float32)
        for column, (first, delta) in enumerate(deltas.items()):
            b[first : first + len(delta.b), usual * column : usual * (column + 1)] = delta.b
        magnitude = None
        if adapter.config.kind == "dora":  # an unchanged part keeps the norms of its rows
            magnitudes = [
                np.linalg.norm(np.asarray(weights[ours], np.float64), axis=1) if m is None else m
                for i, ours in sorted(parts.items())
                for m in [deltas[i].magnitude if i in deltas else None]
            ]
            magnitude = np.concatenate(magnitudes).astype(np.float32)
        changes[module] = np.concatenate([delta.a for delta in deltas.values()]), b, magnitude
    return changes


def peft_files(
    adapter: Adapter, family: Family, config: TransformerConfig, weights: Mapping[str, Any], rank_stabilized: bool
) -> tuple[dict[str, Any], dict[str, NDArray]]:
    """Convert an adapter of ours to PEFT's format: adapter_config.json without the base's name, and the tensors.

    weights: the base's. rank_stabilized: write rsLoRA, whose factor is alpha / sqrt(R).
    """
    usual, changes = adapter.config.rank, changes_of_modules(adapter, family, config, weights)
    tensors = {
        f"{PREFIX}{module}.{end}": array
        for module, change in changes.items()
        for end, array in zip(PARTS, change, strict=False)
        if array is not None
    }
    ranks = {module: len(a) for module, (a, _, _) in changes.items()}
    alphas = {
        module: adapter.config.factor * (rank**0.5 if rank_stabilized else rank) for module, rank in ranks.items()
    }
    folder = family.model_type.replace("-", "_")
    task = TASKS.get(config.architecture)
    place = {
        "base_model_class": written_config(family, config)["architectures"][0],
        "parent_library": f"transformers.models.{folder}.modeling_{folder}",
    }
    alpha = adapter.config.factor * (usual**0.5 if rank_stabilized else usual)
    return {
        "peft_type": "LORA",
        "task_type": task,
        "auto_mapping": None if task else place,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": alpha,
        "lora_dropout": adapter.config.dropout,
        "use_dora": adapter.config.kind == "dora",
        "use_rslora": rank_stabilized,
        "target_modules": sorted(ranks),
        "rank_pattern": {module: rank for module, rank in ranks.items() if rank != usual},
        "alpha_pattern": {module: value for module, value in alphas.items() if ranks[module] != usual},
        "bias": "none",
        "fan_in_fan_out": any(
            at.transposed and names[0].removesuffix(".weight") in ranks for names, at in family.places(config).values()
        ),
        "init_lora_weights": True,
        "modules_to_save": None,
    }, tensors
