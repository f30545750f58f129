"""Read and write folders of sentence-transformers: the modules after the encoder (see `core/text_embedding.py`).

modules.json                          the modules in order: encoder, pooling, dense layers, normalisation
N_Pooling/config.json                 which rows are pooled, and how
N_Dense/config.json, weights          a dense layer
sentence_bert_config.json             the longest text, and lower-casing
config_sentence_transformers.json     prompts, and how vectors are compared
sparse_linear.pt, colbert_linear.pt   bge-m3's heads: a weight and a vector for each token
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.folders import MODULES
from mlx_transformer.core.heads import Pooling
from mlx_transformer.core.text_embedding import Activation, Dense, Similarity, TextEmbedding
from mlx_transformer.core.tokenizer_files import JOINT
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import short
from mlx_transformer.system.files import JsonObject, check_name, optional_object, read_json, read_object
from mlx_transformer.system.torch_files import stored_torch_tensors

from .weights import open_weights

PROMPTS, LIMITS = "config_sentence_transformers.json", "sentence_bert_config.json"
KINDS = "bert roberta distilbert camembert albert xlm-roberta xlnet".split()
"""Names of the file with the longest text: sentence_KIND_config.json; all mean the same."""
FLAGS: dict[Pooling, tuple[str, str]] = {
    "cls": ("pooling_mode_cls_token", "cls"),
    "max": ("pooling_mode_max_tokens", "max"),
    "mean": ("pooling_mode_mean_tokens", "mean"),
    "mean_sqrt_len": ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    "weighted_mean": ("pooling_mode_weightedmean_tokens", "weightedmean"),
    "last": ("pooling_mode_lasttoken", "lasttoken"),
}
"""{our name: (flag, name in newer files)}; several poolings are concatenated in this order."""
PARTS = ("Transformer", "Pooling", "Dense", "Normalize")
CLASSES: dict[Activation, str] = {
    "identity": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
}


HEADS = {"sparse": "sparse_linear.pt", "multi": "colbert_linear.pt"}
"""{head: file with its linear layer's weight and bias}; sentence-transformers doesn't read these files."""


class SentenceFolder(NamedTuple):
    """A sentence-transformers folder."""

    network: Path
    """The encoder's folder."""
    embedding: TextEmbedding
    notes: list[str]
    """Lines to print."""


def read_sentence_folder(path: Path) -> SentenceFolder:
    """Read the modules after the encoder. Raises `UserError` for damaged files, and for a module of another kind or in
    another order, by its name."""
    parts = _parts(path)
    kinds = [kind for kind, _ in parts]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] != sorted(kinds[2:]) or kinds.count("Normalize") > 1:
        raise UserError(f"{path / MODULES}: its parts are {', '.join(kinds)}; read are {', then '.join(PARTS)}")
    network, pooling = parts[0][1], parts[1][1]
    pooled = read_object(pooling / "config.json")
    layers: list[Dense] = []
    weights: dict[str, Any] = {}
    for i, (_, folder) in enumerate(part for part in parts if part[0] == "Dense"):
        layer, arrays = _dense(folder)
        layers.append(layer)
        weights |= {f"dense.{i}.{name}": array for name, array in arrays.items()}
    heads = [head for head, file in HEADS.items() if (path / file).is_file()]
    for head in heads:
        stored = stored_torch_tensors(path / HEADS[head])
        weights |= {f"{head}.{name}": np.asarray(array) for name, array in stored.items()}
    more = optional_object(path / PROMPTS)
    prompts, default = dict(more.object("prompts")), more.text("default_prompt_name")
    similarity: Any = more.text("similarity_fn_name")
    files = [network / f"sentence_{kind}_config.json" for kind in KINDS]
    limits, notes = optional_object(next((file for file in files if file.is_file()), network / LIMITS)), []
    _check_rows(limits)
    ways = _ways(pooled)
    if "cls" in ways and not pooled.flag("include_prompt", True):
        raise UserError(
            f"{pooling / 'config.json'}: include_prompt is off; which token is the first then, sentence-transformers 5"
            " and 6 say differently"
        )
    try:
        embedding = TextEmbedding(
            pooling=ways,
            dense=layers,
            normalize="Normalize" in kinds,
            max_length=_longest(limits, network),
            lower_case=limits.flag("do_lower_case"),
            prompts=prompts,
            default_prompt=default if default in prompts else None,
            prompt_counts=pooled.flag("include_prompt", True),
            similarity=similarity if similarity in get_args(Similarity) else None,
            sparse="sparse" in heads,
            multi=_rows(weights.get("multi.weight")) if "multi" in heads else None,
            weights=weights,
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    cut = optional_object(network / JOINT).object("truncation").whole("max_length")
    if cut is not None and embedding.max_length is not None and cut != embedding.max_length:
        notes.append(f"{JOINT} ends texts after {cut} tokens, {LIMITS} after {embedding.max_length}, which counts")
    if default is not None and embedding.default_prompt is None:
        notes.append(f"its default prompt {default!r:.60} is none of its prompts")
    return SentenceFolder(network, embedding, notes)


def sentence_files(embedding: TextEmbedding, d_model: int, max_positions: int) -> dict[str, Any]:
    """Return {file name: values} of the folder's JSON files, except the encoder's."""
    width = len(embedding.pooling) * d_model
    pooling: dict[str, Any] = {"word_embedding_dimension": d_model}
    if list(embedding.pooling) == [way for way in FLAGS if way in embedding.pooling]:
        pooling |= {flag: way in embedding.pooling for way, (flag, _) in FLAGS.items()}
    else:  # only newer files have an order
        pooling["pooling_mode"] = [FLAGS[way][1] for way in embedding.pooling]
    kinds = ["Transformer", "Pooling", *["Dense"] * len(embedding.dense), *["Normalize"] * embedding.normalize]
    places = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    files: dict[str, Any] = {
        MODULES: [
            {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
        ],
        f"{places[1]}/config.json": {**pooling, "include_prompt": embedding.prompt_counts},
        LIMITS: {"max_seq_length": min(embedding.max_length or max_positions, max_positions)}
        | {"do_lower_case": embedding.lower_case},
        PROMPTS: {
            "prompts": dict(embedding.prompts),
            "default_prompt_name": embedding.default_prompt,
            "similarity_fn_name": embedding.similarity,
        },
    }
    for i, layer in enumerate(embedding.dense, 2):
        shape = {"in_features": width, "out_features": layer.width, "bias": layer.bias}
        files[f"{places[i]}/config.json"] = {**shape, "activation_function": CLASSES[layer.activation]}
        width = layer.width
    return files


def dense_weights(embedding: TextEmbedding) -> Iterator[tuple[str, dict[str, NDArray]]]:
    """Yield (folder, arrays) for each dense layer."""
    for i, layer in enumerate(embedding.dense):
        names = ("weight", "bias") if layer.bias else ("weight",)
        yield f"{i + 2}_Dense", {f"linear.{name}": embedding.weights[f"dense.{i}.{name}"] for name in names}


def head_weights(embedding: TextEmbedding) -> Iterator[tuple[str, dict[str, NDArray]]]:
    """Yield (file, arrays) for each head."""
    for head in embedding.kinds[1:]:
        yield HEADS[head], {name: embedding.weights[f"{head}.{name}"] for name in ("weight", "bias")}


def _parts(path: Path) -> list[tuple[str, Path]]:
    """Return (kind, folder) of each module."""
    file = path / MODULES
    listed = read_json(file)
    if not isinstance(listed, list) or not all(isinstance(part, dict) for part in listed):
        raise UserError(f"{file}: expected a list of parts")
    parts = []
    for i, part in enumerate(listed):
        values = JsonObject(part, f"{file}: part {i}")
        name, place = values.text("type") or "", values.text("path")
        package, kind = name.partition(".")[0], name.rpartition(".")[2]
        if package != "sentence_transformers" or kind not in PARTS:
            raise UserError(f"{file}: {name[:80]!r} is none of the parts that are read: {', '.join(PARTS)}")
        if place is None or place.startswith(("/", "\\")) or ".." in place or ":" in place or not place.isprintable():
            raise UserError(f"{file}: {place!r:.80} is no folder within it")
        check_name(path / place)
        parts.append((kind, path / place))
    return parts


def _ways(pooled: JsonObject) -> list[Pooling]:
    """Return a file's poolings. The mean is among them unless its flag is off."""
    if names := pooled.texts("pooling_mode"):
        known: dict[str, Pooling] = {theirs: ours for ours, (_, theirs) in FLAGS.items()}
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"{pooled.where}: pooling_mode {unknown[0]!r:.60} is not one of {', '.join(known)}")
        return [known[name] for name in names]
    return [way for way, (flag, _) in FLAGS.items() if pooled.flag(flag, way == "mean")]


def _dense(folder: Path) -> tuple[Dense, dict[str, Any]]:
    values = read_object(folder / "config.json")
    name = values.text("activation_function", CLASSES["tanh"])
    known: dict[str, Activation] = {theirs: ours for ours, theirs in CLASSES.items()}
    for key in ("module_input_name", "module_output_name"):
        if (other := values.text(key)) not in (None, "sentence_embedding"):
            raise UserError(f"{folder}: {key} is {other!r:.60}; read are layers of the pooled vector alone")
    if values.flag("use_residual"):
        raise UserError(f"{folder}: use_residual is on; read are layers whose input isn't added to what they give")
    if name not in known:
        raise UserError(f"{folder}: activation_function {name!r:.80} is not one of {', '.join(known)}")
    stored = open_weights(folder)
    arrays = {name.removeprefix("linear."): np.asarray(array) for name, array in stored.items()}
    width = _rows(arrays.get("weight"), values.whole("out_features") or 1)
    return Dense(width=width, activation=known[name], bias="bias" in arrays), arrays


def _rows(weight: Any, unknown: int = 1) -> int:
    """Return a matrix's number of rows; `unknown` if it isn't a matrix, which is an error later."""
    return weight.shape[0] if weight is not None and weight.ndim == 2 else unknown


def _check_rows(limits: JsonObject) -> None:
    """Raise `UserError` if pooling doesn't use the encoder's last layer, or if the text is changed beforehand."""
    task = limits.text("transformer_task")
    paths = [task] * (task != "feature-extraction")
    paths += [limits.object("modality_config").object("text").text("method_output_name")]
    paths += [limits.text("module_output_name")]
    for name in paths:
        if name not in (None, "last_hidden_state", "token_embeddings"):
            raise UserError(f"{limits.where}: gives {name!r:.60}; read are folders that pool the last layer's rows")
    for key in ("processing_kwargs", "query_length", "document_length", "query_expansion"):
        if limits.get(key):
            raise UserError(f"{limits.where}: {key} is {short(limits[key])}, which isn't read")


def _longest(limits: JsonObject, network: Path) -> int | None:
    """Return the longest text in tokens, by default the tokenizer's limit."""
    longest = limits.whole("max_seq_length")
    own = optional_object(network / "tokenizer_config.json").get("model_max_length")
    return longest if longest is not None else own if type(own) is int and own < 1 << 20 else None
