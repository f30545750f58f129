"""Marian's own files to a checkpoint of ours: `import model.npz`, `import model.bin`, `import FOLDER`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_transformer.core.card import carried
from mlx_transformer.core.checkpoint import CHECKPOINT, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import INT8_SCALES, Int8Scales, ProductScales, multiplied_names
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.parameters import output_weight_name, quantizable_shapes
from mlx_transformer.core.sentencepiece import read_sentencepiece
from mlx_transformer.core.sentencepiece_tokenizer import tokenizer_json
from mlx_transformer.core.shortlist import read_shortlist
from mlx_transformer.core.tokenizer import Tokenizer
from mlx_transformer.core.tokenizer_files import join_texts
from mlx_transformer.families.origin import place_of
from mlx_transformer.generation.settings import SHORTLIST, Settings, checked_settings, settings_text
from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.manifest import CARD

from .archive import read_npz
from .folder import MarianFiles, find_files
from .items import INTGEMM8, Item, read_bin
from .network import OUTPUT, SCALE, config_of, places, read_weights
from .options import parse_options, read_options

ORIGIN = "marian.json"
"""In a checkpoint: where it comes from, and which of its files are the original ones."""
FORMAT = 1


@dataclass(frozen=True)
class Original:
    """A model's file, read."""

    path: Path
    items: Mapping[str, Item]
    options: str
    config: TransformerConfig
    sizes: tuple[int, int]
    """Pieces of the source's and the target's vocabulary."""


def import_marian(path: str | Path, out: Target, force: bool = False) -> list[str]:
    """Write a Marian model, a file or the folder that holds it, as this project's checkpoint `out`.

    Integers become the float32 numbers that they stand for, and their scales go into int8_scales.json. The `.bin`,
    vocabularies, shortlist and settings stay beside them, so that `to_marian` can give them back. Returns notes: what
    is missing. `out` is new or empty, or with `force` a checkpoint that is replaced. Raises `UserError` with everything
    that is wrong.
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
    """Return a file of either kind. `UserError` for what is damaged, and for options of another network."""
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
    """Return the tensors of a file of either kind, the options as the last."""
    return read_npz(path) if path.suffix == ".npz" else read_bin(path)


def settings_of(files: MarianFiles, config: TransformerConfig, tokenizer: str | None) -> tuple[Settings, list[str]]:
    """Return how the model is meant to be searched, by Marian's settings, and a note: what of them was left behind.

    Marian never writes <unk> unless it is told that it may.
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
    """Return the scales of all products; None unless the file has integers and a scale for each of them."""
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
    """Return the text of the tokenizer that `.spm` files give, with the padding behind the pieces; or None and a note.

    `UserError` for a vocabulary that isn't the model's.
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
    if files.model.suffix != ".bin":  # of which a copy is kept
        values |= place_of(files.model, [files.model], out)
    return (
        json.dumps({"format": FORMAT, **values, "generation": files.generation or {}, "options": options}, indent=2)
        + "\n"
    )
