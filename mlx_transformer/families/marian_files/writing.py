"""A checkpoint of ours as Marian's own files, for Marian, Bergamot's and Firefox's engines."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.card import Form, carried, write_card
from mlx_transformer.core.checkpoint import Checkpoint, open_checkpoint, resolve
from mlx_transformer.core.config import KINDS, TransformerConfig
from mlx_transformer.core.int8_scales import SYMMETRIC, Int8Scales, multiplied_names, read_int8_scales
from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.core.parameters import output_weight_name, parameter_shapes
from mlx_transformer.core.sentencepiece import sentencepiece_bytes
from mlx_transformer.core.sentencepiece_tokenizer import sentencepiece_of
from mlx_transformer.core.shortlist import Shortlist, shortlist_bytes
from mlx_transformer.core.tokenizer import checked_tokenizer
from mlx_transformer.core.tokenizer_files import side_texts
from mlx_transformer.system.durable import Target, replace_folder
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import read_json
from mlx_transformer.system.stored import Stored
from mlx_transformer.system.version import __version__

from .archive import write_npz
from .conversion import ORIGIN, read_original
from .folder import holds_marian
from .items import Item, float_item, int8_item, is_quantized, options_item, write_bin
from .network import OUTPUT, SCALE, config_of, places, read_weights, written
from .options import ACTIVATIONS, parse_options, read_options, write_options

FREE = ("max_positions", "dropout", "attention_dropout", "activation_dropout", "rotary_base")
FREE += ("relative_buckets", "relative_distance", "attention_bias", "feed_forward_bias", "output_bias")
"""Fields of a config that Marian's network doesn't ask for; biases that are missing are written as zeros."""
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
    """Write a checkpoint (or a run's folder) as a folder `out` of Marian's own files.

    These are the weights in float32 (`.npz`), where there is a scale for each product also as integers (`.bin`),
    vocabularies, options, settings, and `shortlist`; None: that of an imported model. `scales`: such as
    `export.marian_scales` takes from a text; None: those of int8_scales.json. A file that was imported and hasn't
    changed is written from its own bytes. Returns notes: what is missing. `out` is new or empty, or with `force` such a
    folder that is replaced. Raises `UserError` with every reason why Marian has no such model.
    """
    output = claim(out, MARIAN, force, resolve(checkpoint))
    opened = open_checkpoint(checkpoint)
    if opened.config.architecture != "encoder-decoder":
        kind = KINDS[opened.config.architecture]
        raise UserError(f"{opened.folder}: is {kind}, and Marian's files hold an encoder with a decoder")
    origin = _origin(opened.folder)
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
    """The names of the files of a folder: as they were in the one that was imported."""

    def __init__(self, origin: dict[str, Any]) -> None:
        vocabularies, model = origin.get("vocabularies", []), origin.get("model", "model.npz")
        self.integers = model if model.endswith(".bin") else "model.intgemm.alphas.bin"
        self.archive = model if model.endswith(".npz") else "model.npz"
        joint, pair = (
            vocabularies if len(vocabularies) == count else names for count, names in enumerate(VOCABULARIES, start=1)
        )
        self.vocabularies = joint, pair


VOCABULARIES = (["vocab.spm"], ["srcvocab.spm", "trgvocab.spm"])


def _origin(folder: Path) -> dict[str, Any]:
    """Return what import has written down; nothing for a model that was trained here."""
    if not (folder / ORIGIN).is_file():
        return {}
    values = read_json(folder / ORIGIN)
    names = [values.get(key) for key in ("model", "shortlist", "settings")] if isinstance(values, dict) else [1]
    names = [*filter(None, names), *(values.get("vocabularies", []) if isinstance(values, dict) else [])]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{folder / ORIGIN}: damaged; restore it from a copy, or import the model again")
    return values


def _vocabularies(opened: Checkpoint, origin: dict[str, Any]) -> tuple[list[bytes], tuple[int, int]]:
    """Return the bytes of one or two `.spm` files, the original ones where there are any, and how many rows each
    has."""
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
    """Name and bytes of the shortlist's file; none where there is none. `UserError` for one of other vocabularies."""
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
    """Raise `UserError` with everything in which the model differs from what Marian makes of its options."""
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
    """Return all parameters that Marian's network has, in their file; `UserError` unless the decoder starts from
    zeros."""
    config = opened.config
    full = dataclasses.replace(config, attention_bias=True, feed_forward_bias=True, output_bias=True)
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
    """Return the file of integers that was imported, if the checkpoint still has its numbers, bit for bit."""
    file = opened.folder / str(origin.get("model"))
    if file.suffix != ".bin" or not file.is_file():
        return None
    original = read_original(file)
    if original.config != dataclasses.replace(opened.config, dropout=original.config.dropout):
        return None
    before, _ = read_weights(original.config, original.sizes, original.items)
    return file if all(np.array_equal(before[name], weights[name]) for name in before) else None


def _lacking(scales: Int8Scales, config: TransformerConfig) -> str:
    """Return why integers can't be written with these scales, or nothing."""
    if missing := [name for name in multiplied_names(config) if scales.of(name).activation is None]:
        return f"there is no scale for what comes to {min(missing)}"
    if unlike := [name for name, entry in scales.products.items() if entry.steps != SYMMETRIC]:
        return f"the activations of {unlike[0]} have {scales.products[unlike[0]].steps} steps, Marian's {SYMMETRIC}"
    return ""


def _integers(config: TransformerConfig, tensors: dict[str, Stored], scales: Int8Scales) -> list[Item]:
    """Return the tensors of a file of integers: matrices rounded by the scales of theirs that are given, or by their
    largest magnitude, and the scales of what they are multiplied with."""
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
            if output and is_quantized(f"{name}{SCALE}"):  # as Marian does, whose converter goes by the name
                items.append(int8_item(f"{name}{SCALE}", np.full((1, 1), 127, np.int8), multiplier(scale)))
    return sorted(items, key=lambda item: item.name)


def _rounded(array: NDArray, m: np.float32) -> NDArray[np.int8]:
    numbers = array * m
    np.clip(numbers, -127, 127, out=numbers)
    return np.rint(numbers, out=numbers).astype(np.int8)


def multiplier(array: NDArray) -> np.float32:
    """Return what a matrix is multiplied with so that its largest magnitude becomes 127; 1 where it is all zeros."""
    largest = max(array.max(), -array.min())
    return np.float32(127) / np.float32(largest) if largest > 0 else np.float32(1)


def _write_settings(folder: Path, origin: dict[str, Any], names: _Names, count: int, listed: Iterable[str]) -> None:
    """Write the settings of Bergamot's engine, which name the other files. listed: the shortlist, if there is one."""
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
