"""Published models to checkpoints of ours and back: folders read, converted by their family's tables, and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mlx_transformer.core.card import begin_card, carried, front_matter, keys_of
from mlx_transformer.core.checkpoint import (
    CHECKPOINT,
    CONFIG,
    HUGGING_FACE,
    open_checkpoint,
    resolve,
    save_checkpoint,
)
from mlx_transformer.core.config import KINDS, TransformerConfig
from mlx_transformer.core.folders import MODULES, PEFT_CONFIG, Place
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.parameters import is_unbounded
from mlx_transformer.core.quantization import Quantization
from mlx_transformer.core.text_embedding import TextEmbedding, read_embedding
from mlx_transformer.core.tokenizer_files import JOINT, side_texts
from mlx_transformer.generation.settings import LANGUAGES, Settings, read_settings, settings_text
from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import read_json
from mlx_transformer.system.manifest import CARD
from mlx_transformer.text.tokenizer import checked_tokenizer

from .added import summary
from .encoder_text import lower_cased
from .engine import exported, imported
from .folder import GENERATION, read_folder, read_languages, read_tokenizer, write_folder
from .generation import settings_of, with_first_end
from .hub import Found, find_model, place_of
from .languages import OF_LANGUAGES
from .peft import read_peft
from .sentence_folder import read_sentence_folder
from .table import FAMILIES, family_of
from .text import languages_of_text, places_of_languages, settings_of_text, with_ends
from .weights import FORMS

ORIGIN = "origin.json"
"""The file of a checkpoint that says what it was made of: a repository of the Hub and its commit, or a folder, from the
checkpoint on, and the digests of its config and weights."""


class Imported(NamedTuple):
    """A published model as one of ours; its weights may still be in their files."""

    config: TransformerConfig
    weights: dict[str, Any]
    tokenizer: str | None
    settings: Settings
    notes: list[str]
    """The parts of the folder that were left behind."""
    text_embedding: TextEmbedding | None = None
    quantization: Quantization = MappingProxyType({})
    """Schemes of the matrices that `weights` holds as they are stored."""
    """The modules behind an encoder in a folder of sentence-transformers."""


def read_published(folder: Path, keep_float16: bool = False) -> Imported:
    """Return the model of a folder of `transformers`; `UserError` as `import_huggingface` says."""
    sentences = read_sentence_folder(folder) if Place.of(folder).holds(MODULES) else None
    folder = folder if sentences is None else sentences.network
    adapter = read_peft(folder)
    network = folder if adapter is None else adapter.base
    source = with_first_end(read_folder(network, keep_float16))
    model_type = source.config.get("model_type")
    if model_type not in list(FAMILIES):
        what = "names no model_type" if model_type is None else f"model_type is {model_type!r:.60}"
        raise UserError(f"{folder}: {what}; these can be imported: {', '.join(sorted(FAMILIES))}")
    family, notes = FAMILIES[model_type], list[str]()
    if adapter is not None:
        source, note = adapter.applied(source, family)
        notes.append(note)
        folder = folder if (folder / JOINT).is_file() else network
    config, weights = imported(family, source)
    heads = family.other_heads(config, source.tensors)
    weights = {n: x.astype(np.float32) if is_unbounded(n, config) else x for n, x in weights.items()}
    tokenizer, unread = read_tokenizer(folder, config, model_type)
    notes += unread
    if tokenizer is not None and config.architecture == "encoder":
        config = with_ends(config, tokenizer)
    if tokenizer is not None:
        notes += summary(tokenizer, config, settings_of_text(folder))
    where = network / (GENERATION if source.generation else CONFIG)
    notes += [f"config.json names no such head: left behind are {first_of(heads, ', ')}"] if heads else []
    if not config.has_decoder:
        if sentences is None:
            return Imported(config, weights, tokenizer, {}, notes)
        sentences.embedding.check_fits(config.d_model, str(sentences.network))
        embedding = sentences.embedding.read()
        if embedding.lower_case and tokenizer is not None:
            tokenizer, embedding = lower_cased(tokenizer), replace(embedding, lower_case=False)
        return Imported(config, weights, tokenizer, {}, [*notes, *sentences.notes], embedding)
    settings, left = settings_of(source.config, source.generation, config, str(where))
    if model_type in OF_LANGUAGES and (languages := read_languages(folder, config, tokenizer)):
        settings[LANGUAGES] = languages
        settings |= places_of_languages(folder, model_type)
        settings |= languages_of_text(folder, languages, config, settings)
    if sentences is not None:
        raise UserError(f"{folder}: its vectors are made of a decoder's output; read are those of encoders alone")
    return Imported(config, weights, tokenizer, settings, [*left, *notes])


def import_huggingface(
    folder: str | Path,
    out: Target,
    force: bool = False,
    keep_float16: bool = False,
    revision: str | None = None,
) -> list[str]:
    """Write the model of a Hugging Face folder (config.json and weights) as this project's checkpoint `out`.

    folder: or where there is none of that name, a name on the Hugging Face Hub, of which `revision` is a branch, tag or
    commit; which commit it was is kept in the checkpoint (origin.json). float16 and bfloat16 are widened to float32;
    keep_float16: float16 stays, and is computed with, but for T5's `down_proj`. Weights go from file to file one by
    one. Returns notes: what of the folder was left behind. `out` is new or empty, or with `force` a checkpoint that is
    replaced; it is written durably, as by `save_checkpoint`. Raises `UserError` for a folder that is damaged or of no
    family in `FAMILIES`, for a name that can't be fetched, and for whatever in it our config can't express.
    """
    output = claim(out, CHECKPOINT, force, Path(folder))
    place = find_model(folder, revision)
    found = Place.of(place.folder)
    if found.what in ("a run", "an ONNX model") or (found.what == "a checkpoint" and found.config is not None):
        raise UserError(f"{folder}: is {found.what} already, which other commands take as it is: nothing to import")
    ours = read_published(place.folder, keep_float16)
    texts, vectors = settings_text(ours.settings), ours.text_embedding
    texts[ORIGIN] = (
        json.dumps(place.origin or place_of(place.folder, sources(place.folder), output.path), indent=2) + "\n"
    )
    texts[CARD] = _card(place, ours.settings)
    texts |= {} if vectors is None else vectors.texts()
    tensors = {} if vectors is None else vectors.tensors()
    save_checkpoint(output, ours.config, ours.weights, ours.tokenizer, texts=texts, tensors=tensors)
    return ours.notes


@contextmanager
def as_checkpoint(model: str | Path) -> Iterator[Path]:
    """The folder of a checkpoint: of a published model one that is made of it and deleted behind, with its name; else
    `model` itself, whatever it is. `UserError` as `import_huggingface` says."""
    if not Place.of(model).is_importable:
        yield Path(model)
        return
    with TemporaryDirectory() as folder:
        out = Path(folder) / (Path(model).resolve().name or "model")
        import_huggingface(model, out)
        yield out


def sources(folder: Path) -> list[Path]:
    """Return the config and the weights of a published folder."""
    names = (
        CONFIG,
        PEFT_CONFIG,
        "adapter_model.*",
        *(part for form in FORMS for part in (form.name, form.index, form.name.replace(".", "-*."))),
    )
    return sorted(file for name in names for file in folder.glob(name))


def to_huggingface(checkpoint: str | Path, out: Target, family: str | None = None, force: bool = False) -> Path:
    """Write a checkpoint (or a run's folder) as a Hugging Face folder `out` that `transformers` reads.

    `family` is a key of `FAMILIES`; by default the first that has such a model.

    Weights go from file to file one by one. `out` is new or empty, or with `force` such a folder that is replaced.
    Raises `UserError` with every reason why the family has no such model.
    """
    output = claim(out, HUGGING_FACE, force, resolve(checkpoint))
    opened = open_checkpoint(checkpoint)
    tokenizer = checked_tokenizer(opened)
    if tokenizer is not None and side_texts(tokenizer) is not None:
        raise UserError(
            f"{opened.folder}: has a vocabulary for each language; a folder for transformers holds one tokenizer.json"
        )
    kind = opened.config.architecture
    if family is None and not any(each.architecture_of_ours == kind for each in FAMILIES.values()):
        raise UserError(f"{opened.folder}: is {KINDS[kind]}, and no family that is written here has such models")
    chosen = family_of(opened.config) if family is None else FAMILIES[family]
    config, weights = exported(chosen, opened.config, opened.unread().items(), opened.folder)
    settings = read_settings(opened.folder, opened.config)
    embedding, card = read_embedding(opened.folder, opened.config.d_model), carried(opened.folder, results=True)
    return write_folder(output, opened.config, config, weights, tokenizer, settings, card, embedding)


def _card(place: Found, settings: Settings) -> str:
    """Return the begin of an imported model's card: what its own says, its languages, and its name on the Hub."""
    codes = dict.fromkeys(code.partition("_")[0] for code in settings.get(LANGUAGES, ()))
    ours = keys_of(begin_card(language=list(codes) or None, base_model=place.repository))
    return front_matter({**ours, **keys_of(carried(place.folder, results=True))})


def pads_either_side(folder: str | Path) -> bool:
    """Return whether `transformers` computes the same of a folder of theirs whichever side is padded."""
    return FAMILIES[read_json(Path(folder) / CONFIG)["model_type"]].counts_tokens
