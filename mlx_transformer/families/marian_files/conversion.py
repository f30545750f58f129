"""Import Marian's own files (`import model.npz`, `import model.bin`, `import FOLDER`), and write a checkpoint as such
files for Marian and the engines of Bergamot and Firefox (`to-marian`)."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.card import Form, carried, write_card
from mlx_transformer.core.checkpoint import CHECKPOINT, Checkpoint, open_checkpoint, resolve, save_checkpoint
from mlx_transformer.core.config import KINDS, TransformerConfig
from mlx_transformer.core.int8_scales import (
    INT8_SCALES,
    SYMMETRIC,
    Int8Scales,
    ProductScales,
    multiplied_names,
    read_int8_scales,
)
from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.core.parameters import output_weight_name, parameter_shapes, quantizable_shapes
from mlx_transformer.core.shortlist import Shortlist, read_shortlist, shortlist_bytes
from mlx_transformer.core.tokenizer_files import join_texts, side_texts
from mlx_transformer.families.hub import place_of
from mlx_transformer.generation.settings import SHORTLIST, Settings, checked_settings, settings_text
from mlx_transformer.system.durable import Target, replace_folder
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import read_json
from mlx_transformer.system.machine import __version__
from mlx_transformer.system.manifest import CARD
from mlx_transformer.system.tensors import Stored
from mlx_transformer.text.sentencepiece import read_sentencepiece, sentencepiece_bytes
from mlx_transformer.text.sentencepiece_tokenizer import sentencepiece_of, tokenizer_json
from mlx_transformer.text.tokenizer import Tokenizer, checked_tokenizer

from .items import (
    INTGEMM8,
    Item,
    float_item,
    int8_item,
    is_quantized,
    options_item,
    read_bin,
    read_npz,
    write_bin,
    write_npz,
)
from .network import OUTPUT, SCALE, config_of, places, read_weights, written
from .options import ACTIVATIONS, MarianFiles, find_files, holds_marian, parse_options, read_options, write_options

ORIGIN = "marian.json"
"""File in an imported checkpoint: its origin, and which of its files are the original's."""
FORMAT = 1


@dataclass(frozen=True)
class Original:
    """A parsed model file."""

    path: Path
    items: Mapping[str, Item]
    options: str
    config: TransformerConfig
    sizes: tuple[int, int]
    """Sizes of the source and target vocabularies."""


def import_marian(path: str | Path, out: Target, force: bool = False) -> list[str]:
    """Convert a Marian model, a file or its folder, to the checkpoint folder `out`. Returns notes on missing parts.

    Quantised weights are dequantised to float32; their scales go into int8_scales.json. The `.bin`, vocabularies,
    shortlist and settings are copied too, so that `to_marian` can write the same files. `out` is new or empty, or with
    `force` another checkpoint, which is replaced. Raises `UserError` with all problems.
    """
    path = Path(path)
    output = claim(out, CHECKPOINT, force, path if path.is_dir() else path.parent)
    files = find_files(path)
    original = read_original(files.model)
    weights, problems = read_weights(original.config, original.sizes, original.items)
    if problems:
        raise UserError(f"{files.model}: its tensors don't fit its options: {first_of(problems)}")
    tokenizer, notes = read_vocabularies(files.vocabularies, original.config, original.sizes, path)
    if files.shortlist is not None:
        shortlist, (sources, targets) = read_shortlist(files.shortlist), original.sizes
        if len(shortlist.offsets) - 1 != sources or shortlist.ids.max(initial=0) >= targets:
            raise UserError(f"{files.shortlist}: is no shortlist of vocabularies of {sources} and {targets} pieces")
    settings, left = settings_of(files, original.config, tokenizer)
    if files.shortlist is not None and files.uses_shortlist:
        settings[SHORTLIST] = files.shortlist.name
    notes += left
    texts = {ORIGIN: _origin(files, original.options, output.path), **settings_text(settings)}
    texts[CARD] = carried(files.model.parent, results=True)
    if scales := read_scales(original):
        texts[INT8_SCALES] = scales.json()
    elif any(item.type == INTGEMM8 for item in original.items.values()):
        notes.append("no int8_scales.json (the file has no scales of activations, or not all)")
    copied = [*([files.model] if files.model.suffix == ".bin" else []), *files.others]
    copies = {file.name: file for file in copied}
    save_checkpoint(output, original.config, weights, tokenizer, texts={**texts, **copies})
    return notes


def read_original(path: Path) -> Original:
    """Parse a `.npz` or `.bin`. Raises `UserError` for damaged files, and for options of other networks."""
    *tensors, options = read_model(path)
    fields, sizes, problems = read_options(parse_options(options.text(), str(path)))
    if problems:
        raise UserError(f"{path}: its options mean no network that can be read: {first_of(problems)}")
    try:
        config = config_of(fields, sizes)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return Original(path, {item.name: item for item in tensors}, options.text(), config, sizes)


def read_model(path: Path) -> list[Item]:
    """The tensors of a `.npz` or `.bin`; the last item is the model's options."""
    return read_npz(path) if path.suffix == ".npz" else read_bin(path)


def settings_of(files: MarianFiles, config: TransformerConfig, tokenizer: str | None) -> tuple[Settings, list[str]]:
    """Our search settings from Marian's, e.g. beam-size, and notes on settings that were dropped.

    Marian never generates <unk> unless allow-unk is on, so it is suppressed here too.
    """
    theirs = files.generation or {}
    settings: Settings = {}
    if theirs.get("beam-size", 1) != 1:
        settings = {"beam": theirs["beam-size"], "penalty_form": "length", "length_penalty": theirs.get("normalize", 0)}
    if "max-length-factor" in theirs:
        settings["max_length_factor"] = theirs["max-length-factor"]
    if tokenizer is not None and not theirs.get("allow-unk", False):
        settings["suppressed"] = [Tokenizer(tokenizer).unk_id]
    notes = [f"{file.name} left behind: it has no line models:" for file in files.unread]
    notes += [f"word-penalty {theirs['word-penalty']} left behind"] if theirs.get("word-penalty", 0) else []
    return checked_settings(settings, config, str(files.settings or files.model)), notes


def read_scales(original: Original) -> Int8Scales | None:
    """The int8 scales of all products; None if the file isn't quantised or lacks a scale of an activation."""
    products, where, items = {}, places(original.config), original.items
    for name in quantizable_shapes(original.config):
        place = where[name]
        item = next(items[each] for each in (place.name, *place.others) if each in items)
        names = [f"{item.name}{SCALE}"]
        if name == output_weight_name(original.config):
            names.insert(0, f"{OUTPUT}{SCALE}")
        activation = next((np.float32(items[each].numbers().item()) for each in names if each in items), None)
        multiplied = name in multiplied_names(original.config)
        if item.type != INTGEMM8 or (multiplied and activation is None):
            return None
        products[name] = ProductScales(activation if multiplied else None, weight=item.multiplier)
    return Int8Scales(products, {"file": original.path.name})


def read_vocabularies(
    vocabularies: tuple[Path, ...], config: TransformerConfig, sizes: tuple[int, int], where: Path
) -> tuple[str | None, list[str]]:
    """tokenizer.json made of `.spm` vocabularies, with padding after their pieces; without a vocabulary: None, a note.

    where: the model's path, for errors. Raises `UserError` for a vocabulary that doesn't fit the model.
    """
    if not vocabularies:
        return None, [f"no tokenizer ({where} has no .spm vocabulary whose ids are the model's): the model takes ids"]
    texts = []
    for file, size in zip(vocabularies * (3 - len(vocabularies)), sizes, strict=True):
        model = read_sentencepiece(file)
        if len(model.pieces) > size:
            raise UserError(f"{file}: has {len(model.pieces)} pieces, and the model {size}: it is another's vocabulary")
        if model.pieces[0].text != "</s>":
            raise UserError(f"{file}: its first piece is {model.pieces[0].text!r}, not </s>: Marian never ends with it")
        rows = range(len(model.pieces), config.pad_id)
        texts.append(tokenizer_json(model, [*(f"<unused {id}>" for id in rows), "<pad>"]))
    joint = len(vocabularies) == 1
    if not joint and config.one_embedding:
        raise UserError(f"{where}: has two vocabularies, and the model one table for both languages")
    return texts[0] if joint else join_texts(*texts), []


def _origin(files: MarianFiles, options: str, out: Path) -> str:
    named = {"model": files.model, "shortlist": files.shortlist, "settings": files.settings}
    values = {key: file.name for key, file in named.items() if file is not None}
    values |= {"vocabularies": [file.name for file in files.vocabularies]}
    if files.model.suffix != ".bin":  # a .bin is copied into the checkpoint
        values |= place_of(files.model, [files.model], out)
    return (
        json.dumps({"format": FORMAT, **values, "generation": files.generation or {}, "options": options}, indent=2)
        + "\n"
    )


FREE = ("max_positions", "dropout", "attention_dropout", "activation_dropout", "rotary_base")
FREE += ("relative_buckets", "relative_distance", "attention_bias", "feed_forward_bias", "output_bias")
FREE += ("attention_output_bias",)
"""Fields of our config that Marian's options don't have. Biases may be off in ours: they are written as zeros."""
USE = "```sh\nmarian-decoder --models {} --vocabs {} --beam-size 4 < source.txt\n```"
MARIAN = Kind("Marian folder", holds_marian, folder=True)
TOKENIZER = (
    "its tokenizer is none that Marian reads: it takes a SentencePiece unigram model made with "
    "--bos_id=-1 --eos_id=0 --unk_id=1"
)


def to_marian(
    checkpoint: str | Path,
    out: Target,
    force: bool = False,
    scales: Int8Scales | None = None,
    shortlist: Shortlist | None = None,
) -> list[str]:
    """Write a checkpoint (or a run's folder) as a folder `out` of Marian's own files. Returns notes on missing parts.

    The folder has weights in float32 (`.npz`), quantised weights (`.bin`) if each product has a scale, vocabularies,
    options, settings and a shortlist. An imported file whose contents haven't changed is copied.
    scales: e.g. measured on a text by `export.marian_scales`; None: those in int8_scales.json. shortlist: None: the
    imported model's. out: new or empty, or with `force` another Marian folder, which is replaced.
    Raises `UserError` with all reasons if Marian has no such model.
    """
    output = claim(out, MARIAN, force, resolve(checkpoint))
    opened = open_checkpoint(checkpoint).widened()  # Marian's files hold float32
    if opened.config.architecture != "encoder-decoder":
        kind = KINDS[opened.config.architecture]
        raise UserError(f"{opened.folder}: is {kind}, and Marian's files hold an encoder with a decoder")
    origin = _origin_of(opened.folder)
    names = _Names(origin)
    vocabularies, sizes = _vocabularies(opened, origin)
    check_network(opened.config, sizes, opened.folder)
    weights = _weights(opened)
    listed = _listed(opened, origin, sizes, shortlist)
    options = origin.get("options") or write_options(opened.config, sizes, f"mlx-transformer {__version__}")
    tensors = written(opened.config, sizes, weights)
    floats = [float_item(name, tensors[name]) for name in sorted(tensors)]
    own, notes = read_int8_scales(opened.folder, opened.config), []
    scales = scales or own
    original = _unchanged(opened, origin, weights) if scales == own else None
    with replace_folder(output) as temporary:
        with open(temporary / names.archive, "wb") as file:
            write_npz(file, [*floats, options_item(options)])
        if original is not None:
            shutil.copyfile(original, temporary / original.name)
        elif scales is None:
            notes.append("no .bin of integers (the checkpoint has no int8_scales.json: give text with --calibrate)")
        elif reason := _lacking(scales, opened.config):
            notes.append(f"no .bin of integers ({reason})")
        else:
            items = _integers(opened.config, tensors, scales)
            with open(temporary / names.integers, "wb") as file:
                write_bin(file, [*items, options_item(options)])
        for name, data in zip(names.vocabularies[len(vocabularies) - 1], vocabularies, strict=True):
            (temporary / name).write_bytes(data)
        for name, data in listed.items():
            (temporary / name).write_bytes(data)
        if settings := origin.get("settings"):
            shutil.copyfile(opened.folder / settings, temporary / settings)
        else:
            _write_settings(temporary, origin, names, len(vocabularies), listed)
        files = [names.archive, *names.vocabularies[len(vocabularies) - 1] * (3 - len(vocabularies))]
        form = Form("marian", ("marian", "bergamot"), USE.format(files[0], " ".join(files[1:])))
        write_card(temporary, opened.config, form, carried(opened.folder, results=True), output.path)
    return notes


class _Names:
    """File names of the folder to write: those of the imported folder, else defaults."""

    def __init__(self, origin: dict[str, Any]) -> None:
        vocabularies, model = origin.get("vocabularies", []), origin.get("model", "model.npz")
        self.integers = model if model.endswith(".bin") else "model.intgemm.alphas.bin"
        self.archive = model if model.endswith(".npz") else "model.npz"
        joint, pair = (
            vocabularies if len(vocabularies) == count else names for count, names in enumerate(VOCABULARIES, start=1)
        )
        self.vocabularies = joint, pair


VOCABULARIES = (["vocab.spm"], ["srcvocab.spm", "trgvocab.spm"])


def _origin_of(folder: Path) -> dict[str, Any]:
    """The contents of marian.json; {} for a model that wasn't imported from Marian's files."""
    if not (folder / ORIGIN).is_file():
        return {}
    values = read_json(folder / ORIGIN)
    names = [values.get(key) for key in ("model", "shortlist", "settings")] if isinstance(values, dict) else [1]
    names = [*filter(None, names), *(values.get("vocabularies", []) if isinstance(values, dict) else [])]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{folder / ORIGIN}: damaged; restore it from a copy, or import the model again")
    return values


def _vocabularies(opened: Checkpoint, origin: dict[str, Any]) -> tuple[list[bytes], tuple[int, int]]:
    """Contents of one or two `.spm` files (the original files, if there are any), and the vocabularies' sizes."""
    text = checked_tokenizer(opened)
    originals = [opened.folder / name for name in origin.get("vocabularies", [])]
    if origin and text is not None and originals and all(file.is_file() for file in originals):
        _, sizes, _ = read_options(parse_options(str(origin.get("options")), f"{opened.folder / ORIGIN}"))
        return [file.read_bytes() for file in originals], sizes
    sides = None if text is None else side_texts(text)
    texts = [text] if sides is None else [sides["source"], sides["target"]]
    models = [None if each is None else sentencepiece_of(json.loads(each)) for each in texts]
    built = [model for model in models if model is not None]
    if len(built) < len(models) or any((model.special[0], model.special[2]) != (1, 0) for model in built):
        raise UserError(f"{opened.folder}: {TOKENIZER}")
    return [sentencepiece_bytes(model) for model in built], (len(built[0].pieces), len(built[-1].pieces))


def _listed(
    opened: Checkpoint, origin: dict[str, Any], sizes: tuple[int, int], shortlist: Shortlist | None
) -> dict[str, bytes]:
    """{name: bytes} of the shortlist's file, {} if there is none. Raises `UserError` if its vocabularies are others."""
    name = origin.get("shortlist")
    if shortlist is None:
        return {} if name is None else {name: (opened.folder / name).read_bytes()}
    offsets, behind = shortlist.offsets[: sizes[0] + 1], shortlist.offsets[sizes[0] + 1 :]
    lists, largest = len(shortlist.offsets) - 1, int(shortlist.ids.max(initial=0))
    if lists < sizes[0] or (behind != offsets[-1]).any() or largest >= sizes[1]:
        raise UserError(
            f"{opened.folder}: the shortlist is of other vocabularies: {lists} source pieces, and target pieces up to "
            f"{largest}; the model has {sizes[0]} and {sizes[1]}"
        )
    name = name or f"lex.{shortlist.first}.{shortlist.best}.s2t.bin"
    return {name: shortlist_bytes(dataclasses.replace(shortlist, offsets=offsets))}


def check_network(config: TransformerConfig, sizes: tuple[int, int], where: Path) -> None:
    """Raise `UserError` unless Marian has such a model: write its options, read them back, and compare all fields."""
    reasons = []
    if config.activation not in ACTIVATIONS.values():
        reasons.append(f"activation={config.activation!r}, Marian has {' and '.join(ACTIVATIONS.values())}")
        config = dataclasses.replace(config, activation="relu")
    try:
        fields, read, problems = read_options(parse_options(write_options(config, sizes, "-"), str(where)))
        theirs = config_of(fields, read)
    except UserError as error:
        raise UserError(f"{where}: Marian has no such model: {error}") from error
    for name, value in vars(config).items():
        if name not in FREE and value != (expected := getattr(theirs, name)):
            reasons.append(f"{name}={value!r}, Marian has {expected!r}")
    if reasons := [*reasons, *problems]:
        raise UserError(f"{where}: Marian has no such model: {first_of(reasons)}")


def _weights(opened: Checkpoint) -> dict[str, Any]:
    """All parameters of Marian's network, not read from their file yet, with zeros for biases we don't have.

    Raises `UserError` unless the embedding of the decoder's start token is zeros.
    """
    config = opened.config
    biases = dict(attention_bias=True, attention_output_bias=None, feed_forward_bias=True, output_bias=True)
    full = dataclasses.replace(config, **biases)
    weights: dict[str, Any] = opened.unread()
    for name in ("embedding.weight", "target_embedding.weight"):
        if name in weights and np.any(weights[name][config.bos_id]):
            row = f"row {config.bos_id} of {name}"
            raise UserError(f"{opened.folder}: Marian's decoders start from zeros, and {row} has other numbers")
    return {
        name: weights[name] if name in weights else np.zeros(shape, np.float32)
        for name, shape in parameter_shapes(full).items()
    }


def _unchanged(opened: Checkpoint, origin: dict[str, Any], weights: dict[str, Any]) -> Path | None:
    """The imported `.bin`, if the checkpoint's weights still equal it bit for bit, else None."""
    file = opened.folder / str(origin.get("model"))
    if file.suffix != ".bin" or not file.is_file():
        return None
    original = read_original(file)
    if original.config != dataclasses.replace(opened.config, dropout=original.config.dropout):
        return None
    before, _ = read_weights(original.config, original.sizes, original.items)
    return file if all(np.array_equal(before[name], weights[name]) for name in before) else None


def _lacking(scales: Int8Scales, config: TransformerConfig) -> str:
    """Why a `.bin` can't be written with these scales; "" if it can."""
    if missing := [name for name in multiplied_names(config) if scales.of(name).activation is None]:
        return f"there is no scale for what comes to {min(missing)}"
    if unlike := [name for name, entry in scales.products.items() if entry.steps != SYMMETRIC]:
        return f"the activations of {unlike[0]} have {scales.products[unlike[0]].steps} steps, Marian's {SYMMETRIC}"
    return ""


def _integers(config: TransformerConfig, tensors: dict[str, Stored], scales: Int8Scales) -> list[Item]:
    """The tensors of a `.bin`: matrices quantised by their scale (if not given, by their largest magnitude), and the
    scales of the activations they are multiplied with."""
    ours = {place.name: name for name, place in places(config).items()}
    items = []
    for name, stored in tensors.items():
        if not is_quantized(name):
            items.append(float_item(name, stored))
            continue
        entry, array = scales.products[ours[name]], np.asarray(stored)
        m = multiplier(array) if entry.weight is None else entry.weight
        items.append(int8_item(name, _rounded(array, m), m))
        if entry.activation is not None:
            scale = np.full((1, 1), entry.activation, np.float32)
            output = ours[name] == output_weight_name(config)
            items.append(float_item(f"{OUTPUT if output else name}{SCALE}", scale))
            if output and is_quantized(f"{name}{SCALE}"):  # Marian's converter quantises this scale too, by its name
                items.append(int8_item(f"{name}{SCALE}", np.full((1, 1), 127, np.int8), multiplier(scale)))
    return sorted(items, key=lambda item: item.name)


def _rounded(array: NDArray, m: np.float32) -> NDArray[np.int8]:
    numbers = array * m
    np.clip(numbers, -127, 127, out=numbers)
    return np.rint(numbers, out=numbers).astype(np.int8)


def multiplier(array: NDArray) -> np.float32:
    """The factor that makes a matrix's largest magnitude 127; 1 for a matrix of zeros."""
    largest = max(array.max(), -array.min())
    return np.float32(127) / np.float32(largest) if largest > 0 else np.float32(1)


def _write_settings(folder: Path, origin: dict[str, Any], names: _Names, count: int, listed: Iterable[str]) -> None:
    """Write config.yml with the settings of Bergamot's engine, which name the other files. listed: shortlist files."""
    integers = (folder / names.integers).is_file()
    vocabularies = names.vocabularies[count - 1] * (3 - count)
    lines = ["relative-paths: true", "models:", f"  - {names.integers if integers else names.archive}", "vocabs:"]
    lines += [f"  - {name}" for name in vocabularies]
    for name in listed:
        lines += ["shortlist:", f"  - {name}", "  - false"]
    search = {"beam-size": 1, "normalize": 1.0, "word-penalty": 0, "max-length-factor": 2.0}
    lines += [f"{key}: {json.dumps(value)}" for key, value in {**search, **(origin.get("generation") or {})}.items()]
    lines += ["gemm-precision: int8shiftAlphaAll"] if integers else []
    (folder / "config.yml").write_text("\n".join(lines) + "\n", encoding="utf-8")
