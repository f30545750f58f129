"""The options inside a Marian model (`special:model.yml`, a flat YAML map), read into our config and written from it;
and the search for a Marian model's files in a folder: weights, vocabularies, shortlist and settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import Place
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import read_text

Values = dict[str, Any]

ACTIVATIONS = {"relu": "relu", "swish": "silu"}
"""{Marian's activation: ours}. Marian's gelu is x sigmoid(1.702 x), which no other model has."""
CELLS = {"self-attention": "attention", "rnn": "ssru"}
TIES = {(True, False, False): "all", (False, True, False): "target-output", (False, False, False): "none"}
TIES |= {(False, False, True): "source-target", (False, True, True): "all"}
"""{(tied-embeddings-all, tied-embeddings, tied-embeddings-src): our tie_embeddings}"""
PLACES = {("", "dan", ""): "post", ("n", "da", "n"): "pre"}
"""{(transformer-preprocess, transformer-postprocess, transformer-postprocess-top): our norm_placement}"""
IGNORED = re.compile(
    r"version|(bert|char)-.*|enc-(cell|cell-depth|type)|dec-cell-(base|high)-depth|dim-rnn|input-types|factors-combine"
    r"|transformer-(aan-.*|dim-aan|guided-alignment-layer|train-bias.*)|ulr-dim-emb|max-length"
)
"""Keys without effect on a Transformer with one encoder."""
OFF = (
    *("layer-normalization", "lemma-dim-emb", "output-omit-bias", "right-left", "skip", "ulr", "factors-dim-emb"),
    *("ulr-trainable-transformation", "transformer-no-projection", "transformer-pool", "transformer-tied-layers"),
    *("transformer-train-positions", "transformer-train-position-embeddings", "transformer-rnn-projection"),
    *("transformer-decoder-dim-ffn", "transformer-decoder-ffn-depth", "output-approx-knn", "transformer-depth-scaling"),
)
"""Keys that mean another network unless they are false, empty or 0."""
READ = (
    *("type", "dim-emb", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn", "dim-vocabs"),
    *("transformer-ffn-depth", "transformer-ffn-activation", "transformer-preprocess", "transformer-postprocess"),
    *("transformer-postprocess-top", "transformer-postprocess-emb", "transformer-decoder-autoreg", "dec-cell"),
    *("tied-embeddings-all", "tied-embeddings", "tied-embeddings-src"),
)


def parse_options(text: str, origin: str) -> Values:
    """The values of a flat YAML map: numbers, text, true, false, and lists. Raises `UserError` with the number of any
    other line. origin: the file's name in errors."""
    values: Values = {}
    key = ""
    for number, line in enumerate(text.rstrip("\0").splitlines(), start=1):
        bare = line.strip()
        if not bare or bare.startswith("#") or bare in ("---", "..."):
            continue
        entry = re.fullmatch(r"\s*-\s+(.*)", line)
        if entry and isinstance(values.get(key), list):
            values[key].append(_value(entry[1]))
            continue
        named = re.fullmatch(r"([\w-]+):(?:\s+(.*))?", line)
        if not named or named[1] in values:
            raise UserError(f"{origin}: line {number} of its options is none that is understood: {bare!r:.80}")
        key, value = named[1], (named[2] or "").strip()
        inner = re.fullmatch(r"\[(.*)\]", value)
        values[key] = [_value(part) for part in inner[1].split(",") if part.strip()] if inner else _value(value)
        if not value:
            values[key] = []
    return values


def read_options(values: Values) -> tuple[Values, tuple[int, int], list[str]]:
    """Fields of our config, the sizes of source and target vocabulary, and all problems of the options."""
    problems = [f"unknown key {key!r}" for key in values if not (key in READ or key in OFF or IGNORED.fullmatch(key))]
    problems += [f"{key} is {_quoted(values[key])}, which means another network" for key in OFF if values.get(key)]
    fixed = {"type": "transformer", "transformer-ffn-depth": 2, "transformer-postprocess-emb": "d"}
    problems += [
        f"{key} is {_quoted(values[key])}, not {_quoted(value)}"
        for key, value in fixed.items()
        if key in values and values[key] != value
    ]
    if "type" not in values:
        problems.append("type is missing")

    def chosen(table: dict[Any, str], keys: tuple[str, ...], defaults: tuple[Any, ...]) -> str:
        chosen_values = tuple(values.get(key, default) for key, default in zip(keys, defaults, strict=True))
        word = chosen_values if len(keys) > 1 else chosen_values[0]
        known = [known for known in table if known == word]
        if not known:
            pairs = " and ".join(f"{key} {_quoted(value)}" for key, value in zip(keys, chosen_values, strict=True))
            problems.append(f"{pairs} is no network that can be read")
        return table[known[0]] if known else next(iter(table.values()))

    def number(key: str) -> int:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{key} is {_quoted(value)}, not a number")
            return 1
        return value

    sizes = values.get("dim-vocabs")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        problems.append(f"dim-vocabs is {_quoted(sizes)}, not two numbers")
        sizes = [1, 1]
    ties = ("tied-embeddings-all", "tied-embeddings", "tied-embeddings-src")
    places = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
    cell = chosen(CELLS, ("transformer-decoder-autoreg",), ("self-attention",))
    if cell == "ssru" and values.get("dec-cell") != "ssru":
        problems.append(f"dec-cell is {_quoted(values.get('dec-cell'))}, not ssru")
    tie = "all" if values.get("tied-embeddings-all") is True else chosen(TIES, ties, (False, False, False))
    fields: Values = dict(
        d_model=number("dim-emb"),
        encoder_layers=number("enc-depth"),
        decoder_layers=number("dec-depth"),
        heads=number("transformer-heads"),
        d_ff=number("transformer-dim-ffn"),
        activation=chosen(ACTIVATIONS, ("transformer-ffn-activation",), ("swish",)),
        norm_placement=chosen(PLACES, places, ("", "dan", "")),
        decoder_self_attention=cell,
        tie_embeddings=tie,
    )
    return fields, (sizes[0], sizes[1]), problems


def write_options(config: TransformerConfig, sizes: tuple[int, int], version: str) -> str:
    """Options for a model of ours, with every key Marian needs. sizes: source and target vocabulary."""

    def word(table: dict[Any, str], ours: str) -> Any:
        return next(theirs for theirs, name in table.items() if name == ours)

    before, behind, top = word(PLACES, config.norm_placement)
    every, tied, sources = word(TIES, config.tie_embeddings)
    recurrent = config.decoder_self_attention == "ssru"
    values: Values = dict.fromkeys(OFF[:7], False) | {"lemma-dim-emb": 0, "ulr-trainable-transformation": False}
    values.pop("factors-dim-emb")
    values |= {
        "dec-cell": "ssru" if recurrent else "gru",
        "dec-cell-base-depth": 2,
        "dec-cell-high-depth": 1,
        "dec-depth": config.decoder_layers,
        "dim-emb": config.d_model,
        "dim-rnn": 1024,
        "dim-vocabs": [*sizes],
        "enc-cell": "gru",
        "enc-cell-depth": 1,
        "enc-depth": config.encoder_layers,
        "enc-type": "bidirectional",
        "input-types": [],
        "tied-embeddings": tied,
        "tied-embeddings-all": every,
        "tied-embeddings-src": sources,
        "transformer-decoder-autoreg": "rnn" if recurrent else "self-attention",
        "transformer-dim-ffn": config.d_ff,
        "transformer-ffn-activation": word(ACTIVATIONS, config.activation),
        "transformer-ffn-depth": 2,
        "transformer-guided-alignment-layer": "last",
        "transformer-heads": config.heads,
        "transformer-no-projection": False,
        "transformer-postprocess": behind,
        "transformer-postprocess-emb": "d",
        "transformer-postprocess-top": top,
        "transformer-preprocess": before,
        "transformer-tied-layers": [],
        "transformer-train-position-embeddings": False,
        "type": "transformer",
        "ulr-dim-emb": 0,
        "version": version,
    }
    return "".join(_line(key, values[key]) for key in sorted(values))


def _line(key: str, value: Any) -> str:
    if isinstance(value, list) and value:
        return f"{key}:\n" + "".join(f"  - {entry}\n" for entry in value)
    return f"{key}: {_quoted(value)}\n"


def _quoted(value: Any) -> str:
    """A value as YAML, for the options and in errors."""
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "true" if value else "false"
    return '""' if value == "" else str(value)[:60]


def _value(text: str) -> Any:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


PAIRS = (("srcvocab*.spm", "trgvocab*.spm"), ("source.spm", "target.spm"))
GENERATION = ("beam-size", "normalize", "word-penalty", "max-length-factor", "allow-unk", "skip-cost")
"""Keys of the settings for the search."""


@dataclass(frozen=True)
class MarianFiles:
    """The files of a Marian model."""

    model: Path
    vocabularies: tuple[Path, ...] = ()
    """A single file for both languages, or source and target; (): the model takes ids."""
    shortlist: Path | None = None
    uses_shortlist: bool = False
    """Whether the settings name the shortlist, i.e. Marian's engines use it."""
    settings: Path | None = None
    generation: dict[str, Any] | None = None
    """The settings of the search, e.g. {"beam-size": 6}."""
    unread: tuple[Path, ...] = ()
    """Possible settings files, which name no model."""

    @property
    def others(self) -> list[Path]:
        """All files except the model."""
        return [*dict.fromkeys(self.vocabularies), *filter(None, (self.shortlist, self.settings))]


def holds_marian(folder: Path) -> bool:
    """Whether a folder has a Marian model and settings that name it, such as `to_marian` writes."""
    try:
        return folder.is_dir() and Place.of(folder).what == "a Marian model" and _settings(folder)[0] is not None
    except UserError:
        return False


def find_files(path: Path) -> MarianFiles:
    """The files of the model at a path, or in a folder. Raises `UserError` if there is no model, or several."""
    folder = path if path.is_dir() else path.parent
    settings, values, unread = _settings(folder)
    named = [folder / Path(name).name for name in _texts(values.get("models"))]
    models = [path] if path != folder else [model for model in named if model.is_file()] or Place(folder).marian_models
    if not models:
        raise UserError(f"{path}: holds no Marian model (model*.npz, model*.bin)")
    if len(models) > 1:
        raise UserError(f"{path}: holds several models: {_names(models)}; give one of them")
    listed = _texts(values.get("shortlist"))[:1]
    shortlists = [folder / Path(name).name for name in listed] or sorted(folder.glob("lex*.bin"))
    if missing := [file.name for file in shortlists if not file.is_file()]:
        raise UserError(f"{settings}: names the shortlist {missing[0]}, which isn't there; restore it, or take it out")
    if len(shortlists) > 1:
        raise UserError(f"{folder}: holds several shortlists: {_names(shortlists)}; leave one")
    generation = {key: values[key] for key in GENERATION if isinstance(values.get(key), int | float)}
    shortlist = shortlists[0] if shortlists else None
    vocabularies = _vocabularies(folder, values)
    return MarianFiles(models[0], vocabularies, shortlist, bool(listed), settings, generation, unread)


def _settings(folder: Path) -> tuple[Path | None, dict[str, Any], tuple[Path, ...]]:
    """(the settings file naming a model, its values, ()), else (None, {}, files that may be settings).

    A config.yml of a training names no model; its search settings are those of its validation.
    """
    files = sorted([*folder.glob("*decoder*.yml"), *folder.glob("config*.yml")])
    for file in files:
        values = parse_options(read_text(file), str(file))
        if "models" in values:
            return file, values, ()
    return None, {}, tuple(files)


def _vocabularies(folder: Path, values: dict[str, Any]) -> tuple[Path, ...]:
    named = [folder / Path(name).name for name in _texts(values.get("vocabs"))]
    if len(named) == 2 and all(file.is_file() and file.suffix == ".spm" for file in named):
        return tuple(dict.fromkeys(named))
    if any(file.suffix != ".spm" for file in named) or any(folder.glob("*vocab*.yml")):
        return ()  # Opus-MT: ids come from a list of pieces in YAML, SentencePiece models only split the text
    for patterns in PAIRS:
        pair = [sorted(folder.glob(pattern)) for pattern in patterns]
        if all(len(files) == 1 for files in pair):
            return pair[0][0], pair[1][0]
    joint = sorted(folder.glob("vocab*.spm"))
    if len(joint) > 1:
        raise UserError(f"{folder}: holds several vocabularies: {_names(joint)}; leave one")
    return tuple(joint)


def _names(files: Sequence[Path]) -> str:
    return first_of([file.name for file in files], ", ")


def _texts(value: Any) -> Sequence[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []
