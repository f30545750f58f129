"""The page about a sentence and its data: one HTML file with its scripts and numbers inside. It works offline: its
policy forbids requests, and running text as code.

The data for the walk through a model, as JSON: weights and tokenizer, with which the page computes the model itself,
or the recorded points of a pass.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from html import escape
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from export.validate.opening import Opened
from export.validate.points import inner_names
from export.web.models import facts_of
from mlx_transformer import page as kit
from mlx_transformer.core.config import SINUSOIDS, TransformerConfig
from mlx_transformer.core.parameters import (
    TOKEN_TYPES,
    output_weight_name,
    parameter_shapes,
    source_embedding_name,
    target_embedding_name,
)
from mlx_transformer.core.positions import rotary_frequencies
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.generation.embed import prepared
from mlx_transformer.page.script import compact, compact_style, joined
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import SPLIT_PATTERN

from .content import in_base64, pieces, token_text
from .sentence import ExplainedSentence

SCRIPTS = ("core.js", "attention.js", "reading.js")


POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
HERE = Path(__file__).parent


def page(
    models: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any] | None = None,
    policy: str = POLICY,
    links: Mapping[str, str] | None = None,
) -> str:
    """Return a self-contained HTML page.

    models: for the walk through a model, from `payload` or `inside`. data: from `content.content`, for more views of
    one sentence in the first model. policy: the page's Content-Security-Policy. links: {repository file: address}, from
    `links_from`; a file without an address is only named.
    """
    walk = kit.neighbour_texts(__file__, "walk/shell.html")
    training = json.loads(kit.neighbour_texts(__file__, "walk/training.json"))
    shown = {"models": models, "words": words(), "links": links or {}, "training": training}
    body = f'<div id="walk">{walk}</div>{_json("walk-data", shown)}'
    css = kit.neighbour_texts(kit.__file__, "kit.css") + kit.neighbour_texts(__file__, "walk/walk.css")
    entry = "walk.js" if all("weights" in model for model in models) else "all.js"
    script = f"(() => {{{joined(HERE / 'walk' / entry)}}})();"
    title = "One word through the model"
    if data is not None:
        body += _more(data)
        css += kit.neighbour_texts(__file__, "explain.css")
        drawn = f"const draw = (data, signal) => {{{kit.neighbour_texts(__file__, *SCRIPTS)}}};"
        script += f"(() => {{{compact(drawn)}{joined(HERE / 'following.js')}}})();"
        title = f"explain: {data['text']}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
    return kit.page("explain", title, body, compact_style(css), script, head)


def words() -> dict[str, Any]:
    """The walk's texts, from words.toml."""
    return tomllib.loads(kit.neighbour_texts(__file__, "walk/words.toml"))


def files_named() -> set[str]:
    """The repository's files named in the walk, e.g. docs/claims/README.md."""
    stations = [said for kind in words().values() if isinstance(kind, dict) for said in kind.values()]
    said = [each for each in stations if isinstance(each, dict)]
    guide = {each["guide"] for each in said if "guide" in each} | {page for _, _, page in words()["glossary"].values()}
    code = {each["code"] for each in said if "code" in each}
    return {*(f"docs/guide/{name}.md" for name in guide), "docs/claims/README.md", *code}


def links_from(folder: Path) -> dict[str, str]:
    """{file: address} for a page in a folder of a clone. Empty elsewhere, since such a page may be sent to others."""
    root, place = HERE.parents[1], folder.resolve()
    if not place.is_relative_to(root) or not (root / "docs/guide").is_dir():
        return {}
    return {file: quote(os.path.relpath(root / file, place).replace(os.sep, "/")) for file in files_named()}


def _json(id: str, data: Any) -> str:
    numbers = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{id}">{numbers}</script>'


def _more(data: Mapping[str, Any]) -> str:
    sections = tomllib.loads(kit.neighbour_texts(__file__, "sections.toml"))
    parts = "".join(_section(data, id, each) for id, each in sections.items())
    return (
        f'<div id="more">{_head(data)}{parts}{_foot(data)}'
        f'<dialog id="large" aria-label="one head"></dialog></div>{_json("data", data)}'
    )


def _head(data: Mapping[str, Any]) -> str:
    output = data["output"]
    arrow = f' <span class="arrow">→</span> <span class="output">{escape(output)}</span>' if output else ""
    score = "" if data["score"] is None else f" Score (log p by the length penalty): {data['score']:g}."
    ran = " and ".join(data["runtimes"])
    return (
        f'<h2 id="more-views">More views: {escape(data["text"])}{arrow}</h2>'
        f'<p class="soft">{escape(data["model"])}: {escape(data["architecture"])}, {escape(data["facts"])}. '
        f'<span id="more-ran">Run by {escape(ran)}.{score}</span></p>'
    )


def _section(data: Mapping[str, Any], id: str, entry: Mapping[str, Any]) -> str:
    text = entry["said"] if isinstance(entry["said"], str) else entry["said"][data["architecture"]]
    if data["recurrent"] and "recurrent" in entry:
        text = f"{text} {entry['recurrent']}"
    return (
        f'<section id="{id}-section" aria-labelledby="{id}-title">'
        f'<h3 class="title" id="{id}-title">{entry["title"]}</h3>'
        f'<p class="note">{text}</p><div class="card" id="{id}"></div></section>'
    )


def _foot(data: Mapping[str, Any]) -> str:
    bits = data["maps"]["bits"]
    step = f"1/{2**bits - 1:,}"
    return (
        f'<p class="note">Attention weights are kept in {bits} bits, steps of {step}; differences between two runs in '
        "parts of 1/127 of the largest of each map. All other numbers have four digits. The logit lens is computed in "
        "NumPy from the values that the model showed.</p>"
    )


T = TypeVar("T")

MOST_PARAMETERS = 1_500_000
"""Most parameters for which the page computes the model: 4 MB of weights in float16."""
ROOM = 1_800_000
"""Most characters of a page's numbers, unless it holds a model; so the page stays under 2 MB."""
SPARE = 1_000_000
"""As many more for a large model's single position, and for maps of many tokens: under 3 MB."""
COMPUTED = {
    "norm_placement": ("post", "pre"),
    "positions": (*SINUSOIDS, "learned", "none"),
    "query_key_norm": (False,),
    "decoder_self_attention": ("attention",),
}
UNKNOWN = ("window", "score_cap", "residual_scale", "query_key_norm_place", "token_types", "head", "decoder")
UNKNOWN += ("layer_pattern", "causal")
"""Fields supported by live/twin.js only at their defaults."""
OF_HEAD = ("head.head_proj", "head", "logits")
WHOLE = ("pooled", "classes", "spans")
"""Heads with one output per row, and heads that read all positions together."""
LIKELIEST = 50
"""Most likely tokens of each position whose texts a recorded pass includes."""
LEFT_OUT = (".query_proj", ".key_proj", ".value_proj", ".gate_proj", ".query_norm", ".key_norm")
"""Points left out of a recorded pass: they repeat other points by heads, or lead up to them."""


def computed_live(config: TransformerConfig, parameters: int) -> bool:
    """Whether the page's own engine, live/twin.js, can compute such a model."""
    defaults = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    known = all(getattr(config, name) in values for name, values in COMPUTED.items())
    plain = all(getattr(config, name) == defaults[name] for name in UNKNOWN)
    return known and plain and parameters <= MOST_PARAMETERS


def page_tokenizer(text: str) -> dict[str, Any] | None:
    """The parts of a tokenizer.json for the page's tokenizer; None for a tokenizer that `train` doesn't make."""
    values = json.loads(text)
    if not isinstance(values.get("model"), dict):
        return None
    before = (values.get("pre_tokenizer") or {}).get("pretokenizers", [])
    if values["model"].get("type") != "BPE" or not before or before[0].get("pattern") != {"Regex": SPLIT_PATTERN}:
        return None
    return {
        "model": {name: values["model"][name] for name in ("vocab", "merges")},
        "added_tokens": [{"id": each["id"], "content": each["content"]} for each in values["added_tokens"]],
        "pre_tokenizer": {"pretokenizers": [{"pattern": {"Regex": SPLIT_PATTERN}}]},
    }


def walked(model: Opened, sentence: ExplainedSentence, room: int) -> dict[str, Any]:
    """Return a model for the page.

    The page computes the model if it can and the output is the model's own; otherwise this pass is recorded in at most
    `room` characters, one position of a large model in `SPARE` more. Raises UserError if it doesn't fit.
    """
    config = model.config
    weights = {name: np.asarray(array, np.float32) for _, name, array in model.engine.parameters()}
    whole = {name: array.shape for name, array in weights.items()} == parameter_shapes(config)
    tokenizer = None if model.tokenizer.separate else page_tokenizer(model.tokenizer.own_json())
    own = sentence.prompted < len(sentence.written) or config.architecture == "encoder"
    own = own and model.embedding is None and not sentence.types  # the page fills gaps in single texts only
    count = sum(array.size for array in weights.values())
    at, name = _chosen(config, sentence), model.folder.resolve().name
    if whole and own and tokenizer and computed_live(config, count):
        how = "Computed in this page, in float64; type, and everything moves."
        title = f"{name}: {config.architecture}, {count:,} numbers. {how}"
        return live(config, weights, tokenizer, name, title, [{"text": sentence.text, "at": at}])
    return recorded(model, sentence, at, room)


def live(
    config: TransformerConfig,
    weights: Mapping[str, NDArray],
    tokenizer: Mapping[str, Any],
    title: str,
    about: str,
    examples: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """A model for the page to run. examples: {"text": the text typed, "at": the place to look first}."""
    return {
        "title": title,
        "said": about,
        "examples": list(examples),
        "config": config.to_dict(),
        "classifier": output_weight_name(config),
        "generation": facts_of(config, {})["generation"],
        "tokenizer": tokenizer,
        "weights": packed_weights(weights),
    }


def recorded(model: Opened, sentence: ExplainedSentence, at: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Record a pass of a model: all positions if they fit, otherwise only the positions in `at`.

    Raises UserError if those don't fit either.
    """
    config = model.config
    names = [name for name in inner_names(config) if not name.endswith(LEFT_OUT)]
    points = model.engine.points(sentence.case(config), names)
    values = {name: np.asarray(points[name], np.float32)[0] for name in names if name in points}
    if config.head.per_row:  # one output per row: shown as a single position
        values = {name: value[None] if name in OF_HEAD else value for name, value in values.items()}
    values |= _points_inside(model, sentence, values)
    values |= _text_vector(model, values)
    values = {name: value for name, value in values.items() if value.ndim > 1} | _biases(model, values)
    arrays, equal = _points(config, values, at, room)
    norms = {name: np.asarray(array, np.float32) for _, name, array in model.engine.parameters() if "norm" in name}
    if config.token_types:
        norms[TOKEN_TYPES] = np.asarray(model.reference.weights[TOKEN_TYPES])
    source = model.tokenizer.source
    words = config.head.kind == "vocabulary"
    likely = np.unique(np.argsort(-values["logits"], axis=-1)[:, :LIKELIEST]) if words else np.zeros(0, int)
    return {
        "title": model.folder.resolve().name,
        "said": f"{model.folder.resolve().name}, {model.label}: one pass, recorded.",
        "examples": [{"text": sentence.text, "at": at}],
        "config": config.to_dict(),
        "classifier": output_weight_name(config),
        "text": sentence.text,
        "output": sentence.output,
        "given": sentence.prompted,
        "tokens": {"source": sentence.source, "target": sentence.target, "written": sentence.written},
        "pieces": {
            "source": pieces(source, sentence.source),
            "target": pieces(model.tokenizer, sentence.target),
            "written": pieces(model.tokenizer, sentence.written),
        },
        "texts": {int(id): token_text(model.tokenizer, int(id)) for id in {*likely.tolist(), *sentence.written}},
        "points": {"arrays": arrays, "equal": equal},
        "types": list(sentence.types),
        "turns": _turns(config),
        "embedding": None if model.embedding is None else _embedding_facts(model.embedding),
        "parameters": {name: _array(array, 16 if _is_half(array) else 32) for name, array in norms.items()},
    }


def _turns(config: TransformerConfig) -> dict[str, list[float]]:
    """Of each stack whose queries and keys are turned: the angle of each pair per position."""
    encoder = {"encoder": config.of("encoder")} if config.has_encoder else {}
    own = encoder | ({"decoder": config.of("decoder")} if config.has_decoder else {})
    return {name: rotary_frequencies(each).tolist() for name, each in own.items() if each.positions == "rotary"}


def _points_inside(model: Opened, sentence: ExplainedSentence, values: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Compute inner values hidden by fused operators, from values they show.

    These are rows of the embedding table, scores from queries and keys, and the outputs of layers.
    """
    config, arrays = model.config, {}
    tables = {"encoder": (source_embedding_name(config), sentence.source)} if config.has_encoder else {}
    tables |= {"decoder": (target_embedding_name(config), sentence.target)} if config.has_decoder else {}
    for stack, (table, ids) in tables.items():
        rows = model.reference.weights[table][list(ids)]
        scaled = {"scaled": rows * np.float32(config.embedding_factor)} if config.scale_embeddings else {}
        arrays |= {f"{stack}.embedding.{point}": value for point, value in {"rows": rows, **scaled}.items()}
    arrays |= layer_outputs(config, values)
    for name, value in values.items():
        part, _, point = name.rpartition(".")
        if point == "queries" and f"{part}.keys" in values:
            keys = values[f"{part}.keys"].repeat(len(value) // len(values[f"{part}.keys"]), axis=0)
            scale = config.attention_scale or 1 / np.sqrt(value.shape[-1])
            scores, cap = value @ keys.swapaxes(1, 2) * np.float32(scale), config.at(part).score_cap
            arrays[f"{part}.scores"] = scores if cap is None else cap * np.tanh(scores / np.float32(cap))
    return {name: value for name, value in arrays.items() if name not in values}


def layer_outputs(config: TransformerConfig, values: Mapping[str, T]) -> dict[str, T]:
    """{layer: output}. A layer's output is the output of its last norm or residual sum."""
    last = ".feed_forward_norm" if config.norm_placement == "post" else ".feed_forward.residual"
    return {name.removesuffix(last): value for name, value in values.items() if name.endswith(last)}


def _text_vector(model: Opened, values: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """The steps from the last layer to a text's vector: pooled, through each dense layer, of unit length; one row
    each."""
    embedding, config = model.embedding, model.config
    if embedding is None:
        return {}
    post = f"encoder.layers.{config.encoder_layers - 1}.feed_forward_norm"
    memory = values[post if config.norm_placement == "post" else "encoder.norm"][None]
    skipped = 0 if embedding.prompt_counts else len(model.tokenizer.encode(prepared(embedding.prompt(), embedding))) - 1
    steps = {"pooled": replace(embedding, dense=(), normalize=False)}
    for i in range(len(embedding.dense)):
        steps[f"dense.{i}"] = replace(embedding, dense=embedding.dense[: i + 1], normalize=False)
    whole = {**steps, "vector": embedding}
    return {f"text.{name}": each.vectors(memory, np.ones(memory.shape[:2]), skipped) for name, each in whole.items()}


def _embedding_facts(embedding: TextEmbedding) -> dict[str, Any]:
    """The pooling settings, for the page's description."""
    dense = [layer.activation for layer in embedding.dense]
    return {"pooling": list(embedding.pooling), "dense": dense, "normalize": embedding.normalize}


def _biases(model: Opened, values: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """{attention.bias: (H, L, S)}: the bias that relative positions add to each score."""
    biases = {}
    for name, scores in values.items():
        attention, _, point = name.rpartition(".")
        if point == "scores" and (bias := model.reference.score_bias(attention, *scores.shape[1:])) is not None:
            biases[f"{attention}.bias"] = bias
    return biases


def _chosen(config: TransformerConfig, sentence: ExplainedSentence) -> dict[str, Any]:
    """The place to look first: the last word before the end of the input, and the first step chosen by the model."""
    word, step = max(0, len(sentence.source) - 2), max(0, min(sentence.prompted, len(sentence.written) - 1))
    return {"word": word, "step": step, "stack": "encoder" if config.has_encoder else "decoder"}


def _points(
    config: TransformerConfig, values: Mapping[str, NDArray], at: Mapping[str, Any], room: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pack the arrays in as many bits and positions as fit.

    Returns the arrays, and {name: [other, shape]} for arrays equal to another.
    """
    equal = {}
    if config.positions == "relative":  # one table per stack
        first = {
            name: f"{name.split('.')[0]}.layers.0.self_attention.bias" for name in values if name.endswith(".bias")
        }
        equal = {name: [other, list(values[name].shape)] for name, other in first.items() if name != other}
    for name in values:
        last = f"{name}.feed_forward_norm"
        if config.norm_placement == "post" and last in values:
            equal[name] = [last, list(values[name].shape)]
    own = {name: value for name, value in values.items() if name not in equal}
    few = {name: rows for name in own if (rows := _rows(config, name, at)) is not None}
    one = own | {name: np.take(own[name], rows, axis=-2) for name, rows in few.items()}
    for bits, names, most in ((32, own, room), (16, own, room), (32, one, room), (16, one, room + SPARE)):
        if sum(value.size for value in names.values()) * bits // 6 <= most:
            arrays = {name: _array(value, bits) for name, value in names.items()}
            if names is one:
                for name, rows in few.items():
                    arrays[name] |= {"rows": rows, "shape": list(own[name].shape)}
            return arrays, equal
    tokens = max(value.shape[-2] for value in own.values())
    most = int(tokens * ((room + SPARE) / (sum(value.size for value in one.values()) * 16 / 6)))
    raise UserError(
        f"{tokens} tokens make a page of more than 3 MB with this model: shorten the text to about {most} tokens"
    )


def _rows(config: TransformerConfig, name: str, at: Mapping[str, Any]) -> list[int] | None:
    """The positions of a point that are needed to follow the one in `at`; None for all."""
    chosen = at["word" if name.startswith("encoder") or not config.has_decoder else "step"]
    if name.startswith("text.") or (name in OF_HEAD and config.head.kind in WHOLE):
        return None
    if not name.endswith((".keys", ".values")):
        return [chosen]
    return list(range(chosen + 1)) if name.startswith("decoder") and ".self_attention." in name else None


def _is_half(array: NDArray) -> bool:
    """Whether float16 holds these numbers exactly."""
    with np.errstate(over="ignore"):
        return bool((array.astype(np.float16).astype(np.float32) == array).all())


def _array(value: NDArray, bits: int) -> dict[str, Any]:
    stored = value.astype("<f4" if bits == 32 else "<f2").tobytes()
    return {"shape": list(value.shape), "bits": bits, "values": in_base64(stored)}


def packed_weights(weights: Mapping[str, NDArray], exact: bool = False) -> str:
    """A model's parameters for the page, as base64 of safetensors.

    float16 if nothing is lost, or if float32 would be too large and `exact` is false; otherwise float32.
    """
    large = sum(array.size for array in weights.values()) > MOST_PARAMETERS / 2
    small = all(map(_is_half, weights.values())) or (large and not exact)
    dtype = np.float16 if small else np.float32
    return in_base64(save({name: array.astype(dtype, order="C") for name, array in weights.items()}))
