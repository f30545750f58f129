"""Convert published models to checkpoints of ours and back, by the tables of their family.

Decoders that make text vectors, e.g. Qwen3-Embedding and EmbeddingGemma, become encoders without a classifier. Their
attention is causal, or bidirectional with Gemma 3's `use_bidirectional_attention`; in the latter case a window of W
keys reaches W // 2 positions to each side.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.adapter import Adapter, read_adapter
from mlx_transformer.core.card import begin_card, carried, first_lines, front_matter, keys_of, put_card
from mlx_transformer.core.checkpoint import (
    CHECKPOINT,
    CONFIG,
    HUGGING_FACE,
    open_checkpoint,
    resolve,
    save_checkpoint,
    weights_digest,
)
from mlx_transformer.core.config import KINDS, TransformerConfig
from mlx_transformer.core.folders import MLX_ADAPTER, MODULES, PEFT_CONFIG, Place
from mlx_transformer.core.heads import VOCABULARY, Head
from mlx_transformer.core.outputs import Kind, claim
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.positions import reordered
from mlx_transformer.core.quantization import KEY, SAME_KEY, Quantization, described, stored_tensors
from mlx_transformer.core.text_embedding import TextEmbedding, read_embedding
from mlx_transformer.core.tokenizer_files import JOINT, side_texts
from mlx_transformer.generation.settings import (
    LANGUAGES,
    TARGET_IN_SOURCE,
    Settings,
    read_settings,
    settings_text,
)
from mlx_transformer.system.durable import Target, replace_folder
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import optional_object, read_json, read_object
from mlx_transformer.system.gguf_files import parts_of
from mlx_transformer.system.manifest import CARD
from mlx_transformer.system.progress import Progress, no_progress
from mlx_transformer.system.tensors import Stored, write_tensors
from mlx_transformer.text.published_ids import roles_of
from mlx_transformer.text.tokenizer import checked_tokenizer

from .added import summary
from .encoder_text import lower_cased
from .engine import (
    Family,
    Published,
    channel_order,
    differences,
    exported,
    imported,
    of_mlx_lm,
    stored_as,
    with_integers,
)
from .folder import GENERATION, ONE_VOCABULARY, read_folder, read_languages, read_tokenizer, write_folder
from .gemma import GEMMA3
from .generation import read_chat, settings_of, with_first_end
from .gguf import as_in_gguf, read_gguf_model
from .hub import Found, find_model, place_of
from .keys import Values
from .languages import OF_LANGUAGES
from .peft import WEIGHTS as PEFT_WEIGHTS
from .peft import changes_of_modules, mlx_files, peft_files, read_peft
from .sentence_folder import SentenceFolder, read_sentence_folder
from .table import FAMILIES, family_of
from .text import SETTINGS, displaced_languages, languages_of_text, places_of_languages, settings_of_text, with_ends
from .weights import FORMS

HEAD = Head(kind="hidden")

TWO_SIDED = "use_bidirectional_attention"


def is_two_sided(source: Published) -> bool:
    """Whether a decoder's attention is bidirectional. Only Gemma 3 has the key; other families refuse it."""
    return bool(source.config.get("model_type") == GEMMA3.model_type and source.config.get(TWO_SIDED))


def without_classifier(source: Published) -> Published:
    """Bring a decoder without a classifier into its family's form: drop classifier tensors, and declare it tied."""
    tensors = {name: array for name, array in source.tensors.items() if not name.startswith("lm_head.")}
    config = {**source.config, "tie_word_embeddings": True}
    if is_two_sided(source):
        del config[TWO_SIDED]
    return dataclasses.replace(source, config=config, tensors=tensors)


def as_encoder(
    config: TransformerConfig, weights: Mapping[str, Any], causal: bool
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Turn a decoder's config and weights into those of an encoder with the same hidden states."""
    fields = dict(architecture="encoder", encoder_layers=config.decoder_layers, decoder_layers=0, causal=causal)
    fields |= dict(head=HEAD, tie_embeddings="all", output_bias=False, logit_scale=None, logit_cap=None)
    fields |= {} if causal else _windows(config, lambda width: width // 2)
    stacks = {"decoder": "encoder", "target_embedding": "embedding"}
    return dataclasses.replace(config, **fields), _renamed(weights, stacks)


def as_decoder(config: TransformerConfig, chosen: Family | None = None) -> tuple[Family, TransformerConfig] | None:
    """Find a family that stores the encoder as a decoder: (family, the decoder's config), or None. chosen: try only
    this family."""
    if config.architecture != "encoder" or config.head != HEAD:
        return None
    fields = dict(architecture="decoder", decoder_layers=config.encoder_layers, encoder_layers=0, causal=False)
    fields |= dict(head=VOCABULARY, tie_embeddings="target-output")
    fields |= {} if config.causal else _windows(config, lambda width: 2 * width)
    try:
        decoder = dataclasses.replace(config, **fields)
    except UserError:  # positions or norms that decoders don't have
        return None
    family = chosen or (family_of(decoder) if config.causal else GEMMA3)
    fits = family.architecture_of_ours == "decoder" and (config.causal or family is GEMMA3)
    return (family, decoder) if fits and not differences(family, decoder) else None


def exported_vectors(
    family: Family, decoder: TransformerConfig, weights: Mapping[str, Any], where: Path, causal: bool
) -> tuple[Values, dict[str, Any]]:
    """config.json and tensors of the family's class without a classifier, whose names have no prefix. weights: the
    encoder's."""
    named = _renamed(weights, {"encoder": "decoder", "embedding": "target_embedding"})
    config, tensors = exported(family, decoder, named.items(), where)
    base = re.sub("(ForCausalLM|LMHeadModel)$", "TextModel" if family is GEMMA3 else "Model", family.architecture)
    config = {**config, "architectures": [base], **({} if causal else {TWO_SIDED: True})}
    return config, {name.removeprefix(family.prefix): array for name, array in tensors.items()}


def _windows(config: TransformerConfig, change: Callable[[int], int]) -> Values:
    def changed(width: int | None) -> int | None:
        return None if width is None else change(width)

    pattern = [
        {**layer, "window": changed(layer["window"])} if "window" in layer else layer for layer in config.layer_pattern
    ]
    return dict(window=changed(config.window), layer_pattern=pattern)


def _renamed(weights: Mapping[str, Any], stacks: Mapping[str, str]) -> dict[str, Any]:
    parts = ((name.partition("."), array) for name, array in weights.items())
    return {f"{stacks.get(first, first)}.{rest}": array for (first, _, rest), array in parts}


ORIGIN = "origin.json"
"""File of a checkpoint with its origin: a repository of the Hub and its commit, or a folder, as a path from the
checkpoint, and the digests of its config and weights."""


class Imported(NamedTuple):
    """A published model in our form; its weights may be read on demand."""

    config: TransformerConfig
    weights: dict[str, Any]
    quantization: Quantization
    """{quantised matrix: scheme}; `weights` has several tensors for each."""
    tokenizer: str | None
    settings: Settings
    notes: list[str]
    """Parts of the folder that were not imported."""
    text_embedding: TextEmbedding | None = None
    """The modules after the encoder in a folder of sentence-transformers."""


def read_published(folder: Path) -> Imported:
    """Read a model from a folder of `transformers` or from a GGUF file. Raises `UserError` as `import_huggingface`
    does."""
    if Place.of(folder).what == "a GGUF model":
        return _read_gguf(folder)
    sentences = read_sentence_folder(folder) if Place.of(folder).holds(MODULES) else None
    folder = folder if sentences is None else sentences.network
    adapter = read_peft(folder)
    network = folder if adapter is None else adapter.base
    source, notes = _text_part(read_folder(network))
    source = with_first_end(source)
    family = stored_as(_family(source), source)
    if adapter is not None:
        source, note = adapter.applied(with_integers(family, source), family)
        notes.append(note)
        folder = folder if any((folder / name).is_file() for name in (JOINT, SETTINGS)) else network
    where = network / (GENERATION if (network / GENERATION).is_file() else CONFIG)
    return _converted(source, family, folder, where, notes, sentences)


def _read_gguf(path: Path) -> Imported:
    found = read_gguf_model(path)
    source = with_first_end(found.published)
    with TemporaryDirectory() as folder:
        for name, text in found.texts.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return _converted(source, as_in_gguf(_family(source), found.fields), Path(folder), path, found.notes)


def _family(source: Published) -> Family:
    model_type = source.config.get("model_type")
    if model_type not in list(FAMILIES):
        what = "names no model_type" if model_type is None else f"model_type is {model_type!r:.60}"
        raise UserError(f"{source.path}: {what}; these can be imported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def _converted(
    source: Published,
    family: Family,
    folder: Path,
    where: Path,
    notes: list[str],
    sentences: SentenceFolder | None = None,
) -> Imported:
    """folder: has the tokenizer's files. where: the file with the generation settings, for errors. notes: parts that
    are not imported."""
    model_type = family.model_type
    makes_vectors = sentences is not None and family.architecture_of_ours == "decoder"
    config, weights = imported(family, without_classifier(source) if makes_vectors else source)
    heads = family.other_heads(config, source.tensors)
    tokenizer, unread = read_tokenizer(folder, config, model_type)
    if makes_vectors:
        config, weights = as_encoder(config, weights, causal=not is_two_sided(source))
    weights, quantization = stored_tensors(weights)
    notes += [described(quantization, quantizable_shapes(config))] if quantization else []
    notes += unread
    if tokenizer is not None and config.architecture == "encoder":
        config = with_ends(config, tokenizer)
    if tokenizer is not None:
        notes += summary(tokenizer, config, settings_of_text(folder))
    if unread := family.unread(source.config):
        notes.append(f"config.json has keys that aren't read and may change the model: {first_of(unread, ', ')}")
    notes += [f"not imported, as config.json names no such head: {first_of(heads, ', ')}"] if heads else []
    if not config.has_decoder:
        if sentences is None:
            return Imported(config, weights, quantization, tokenizer, {}, notes)
        sentences.embedding.check_fits(config.d_model, str(sentences.network))
        embedding = sentences.embedding.read()
        if embedding.lower_case and tokenizer is not None:
            tokenizer, embedding = lower_cased(tokenizer), replace(embedding, lower_case=False)
        return Imported(config, weights, quantization, tokenizer, {}, [*notes, *sentences.notes], embedding)
    settings, left = settings_of(source.config, source.generation, config, str(where))
    languages = read_languages(folder, config, tokenizer) if model_type in (*OF_LANGUAGES, "marian") else {}
    if model_type == "marian" and len(languages) > 1:
        tokens = first_of([f">>{code}<<" for code in languages], ", ")
        settings |= {LANGUAGES: languages, TARGET_IN_SOURCE: True}
        notes.append(f"translates into {len(languages)} languages: name one, or begin each text with one of {tokens}")
    elif languages and model_type in OF_LANGUAGES:
        settings[LANGUAGES] = languages
        settings |= places_of_languages(folder, model_type)
        settings |= languages_of_text(folder, languages, config, settings)
        notes += displaced_languages(folder, config, languages)
    if config.architecture == "decoder":
        settings |= read_chat(folder, settings_of_text(folder))
    if sentences is not None:
        raise UserError(f"{folder}: its vectors are made by {KINDS[config.architecture]}; supported: one stack")
    return Imported(config, weights, quantization, tokenizer, settings, [*left, *notes])


def import_huggingface(
    folder: str | Path,
    out: Target,
    force: bool = False,
    revision: str | None = None,
    watch: Progress = no_progress,
) -> list[str]:
    """Convert a published model to a checkpoint `out`; returns notes on parts that were not imported.

    folder: a Hugging Face folder (config.json and weights), a GGUF file, or a name on the Hugging Face Hub. revision: a
    branch, tag or commit for such a name; the commit is recorded in the checkpoint (origin.json). out: new or empty;
    with `force` it may be a checkpoint, which is replaced. Weights are copied one at a time, in their own type. Raises
    `UserError` for a damaged folder, a family that isn't in `FAMILIES`, a name that can't be fetched, and anything that
    our config can't express.

    >>> import_huggingface("facebook/bart-base", "runs/bart")
    """
    output = claim(out, CHECKPOINT, force, Path(folder))
    place = find_model(folder, revision)
    found = Place.of(place.folder)
    if found.what in ("a run", "an ONNX model") or (found.what == "a checkpoint" and found.config is not None):
        raise UserError(f"{folder}: is {found.what} already, which other commands take as it is: don't import it")
    ours = read_published(place.folder)
    texts, vectors = settings_text(ours.settings), ours.text_embedding
    texts[ORIGIN] = (
        json.dumps(place.origin or place_of(place.folder, sources(place.folder), output.path), indent=2) + "\n"
    )
    texts[CARD] = _card(place, ours.settings)
    texts |= {} if vectors is None else vectors.texts()
    tensors = {} if vectors is None else vectors.tensors()
    of_files = {"texts": texts, "tensors": tensors, "quantization": ours.quantization}
    save_checkpoint(output, ours.config, _watched(ours.weights, watch), ours.tokenizer, **of_files)
    return ours.notes


def _watched(weights: Mapping[str, Any], watch: Progress) -> dict[str, Any]:
    """Wrap the arrays so that `watch` is called before each is read."""
    total, done = max(1, sum(array.nbytes for array in weights.values())), 0

    def read(name: str) -> NDArray:
        nonlocal done
        watch(min(1.0, done / total), name)
        done += weights[name].nbytes
        return np.asarray(weights[name])

    return {name: Stored(array.shape, array.dtype, partial(read, name)) for name, array in weights.items()}


@contextmanager
def as_checkpoint(model: str | Path) -> Iterator[Path]:
    """Yield a checkpoint's folder. A published model is imported to a temporary folder with its name; any other path is
    yielded as it is. Raises `UserError` as `import_huggingface` does."""
    if not Place.of(model).is_importable:
        yield Path(model)
        return
    with TemporaryDirectory() as folder:
        out = Path(folder) / (Path(model).resolve().name or "model")
        import_huggingface(model, out)
        yield out


def folder_of(model: str | Path) -> Path:
    """A published model's own path, or the folder of a checkpoint, which may be inside a run's folder."""
    return Path(model) if Place.of(model).is_importable else resolve(model)


def sources(folder: Path) -> list[Path]:
    """The files with config and weights of a published folder, or all parts of a GGUF file."""
    if folder.is_file():
        return parts_of(folder)
    names = (
        CONFIG,
        PEFT_CONFIG,
        "adapter_model.*",
        MLX_ADAPTER,
        *(part for form in FORMS for part in (form.name, form.index, form.name.replace(".", "-*."))),
    )
    return sorted(file for name in names for file in folder.glob(name))


def to_huggingface(
    checkpoint: str | Path, out: Target, family: str | None = None, force: bool = False, mlx_lm: bool = False
) -> Path:
    """Write a checkpoint (or a run's folder) as a Hugging Face folder `out` that `transformers` reads; returns `out`.

    family: a key of `FAMILIES`; default: the first family with such a model. mlx_lm: write mlx-lm's format, which keeps
    the integers of quantised matrices; only MLX reads it. out: new or empty; with `force` it may be such a folder,
    which is replaced. Weights are copied one at a time. Raises `UserError` with all reasons if the family has no such
    model.
    """
    output = claim(out, HUGGING_FACE, force, resolve(checkpoint))
    opened = open_checkpoint(checkpoint)
    tokenizer = checked_tokenizer(opened)
    sides = None if tokenizer is None else side_texts(tokenizer)
    if sides is not None and not roles_of(json.loads(sides["source"])):
        raise UserError(f"{opened.folder}: {ONE_VOCABULARY}")
    chosen = family_of(opened.config) if family is None else FAMILIES[family]
    tensors: dict[str, Any] = dict(opened.unread())
    if mlx_lm:
        if opened.config.architecture != "decoder":
            raise UserError(f"{opened.folder}: mlx-lm runs only decoders, but this is an {opened.config.architecture}")
        if opened.adapted_integers:
            raise UserError(f"{opened.folder}: has an adapter beside its integers: merge it first")
        tensors |= {name: matrix for name, matrix in opened.matrices().items() if matrix.scheme.runs_in_mlx}
        chosen = of_mlx_lm(chosen)
    config, vectors = opened.config, as_decoder(opened.config, None if family is None else chosen)
    if vectors is not None and differences(chosen, config):
        theirs = exported_vectors(*vectors, tensors, opened.folder, config.causal)
    else:
        theirs = exported(chosen, config, tensors.items(), opened.folder)
    settings = read_settings(opened.folder, opened.config)
    embedding, card = read_embedding(opened.folder, opened.config.d_model), carried(opened.folder, results=True)
    return write_folder(output, opened.config, theirs, tokenizer, settings, card, embedding, mlx_lm)


def with_peft(
    path: Path, config: TransformerConfig, tensors: Mapping[str, Any], where: Path
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Merge an adapter of PEFT or mlx-lm into a model of ours; returns its config and weights.

    path: the adapter's folder. tensors: the model's weights. where: the model's folder, for errors. Tries all families
    with such a model; raises `UserError` if none has the adapter's matrices.
    """
    adapter, refusals = read_peft(path), list[UserError]()
    assert adapter is not None
    for family in FAMILIES.values():
        if differences(family, config):
            continue
        family = of_mlx_lm(family) if adapter.of_mlx_lm else family
        try:
            theirs, arrays = exported(family, config, tensors.items(), where)
            changed, weights = imported(family, adapter.applied(Published(where, theirs, {}, arrays), family)[0])
        except UserError as error:
            refusals.append(error)
            continue
        if (order := channel_order(family, config)) is not None:
            changed, weights = replace(changed, positions=config.positions), reordered(weights, np.argsort(order))
        return changed, weights
    raise refusals[0] if refusals else UserError(f"{where}: no family of published models has such a model")


def adapter_of(path: Path, config: TransformerConfig, base: str) -> Adapter:
    """Convert an adapter of PEFT or mlx-lm to ours. base: SHA-256 of the base's weights. Errors as in `with_peft`."""
    adapter, refusals = read_peft(path), list[UserError]()
    assert adapter is not None
    for family in FAMILIES.values():
        if not differences(family, config):
            try:
                return adapter.as_ours(of_mlx_lm(family) if adapter.of_mlx_lm else family, config, base)
            except UserError as error:
                refusals.append(error)
    raise refusals[0] if refusals else UserError(f"{path}: no family of published models has such a model")


PEFT = Kind("published adapter", lambda folder: Place.of(folder).what == "a published adapter", folder=True)


def to_peft(
    base: str | Path,
    adapter: str | Path,
    out: Target,
    name: str | None = None,
    rank_stabilized: bool = False,
    force: bool = False,
    mlx_lm: bool = False,
) -> Path:
    """Write an adapter of ours in PEFT's format (or mlx-lm's), for the published model that the base was imported from.

    base: the checkpoint that the adapter was trained from. name: the published model, a folder or ORG/NAME; default:
    the base's origin. rank_stabilized: write rsLoRA's form, which computes the same. Raises `UserError` if the adapter
    was trained from other weights, and if the published model can't be found or differs from the base.
    """
    output = claim(out, PEFT, force, resolve(base), Path(adapter))
    opened, change = open_checkpoint(base).base, read_adapter(adapter)
    change.check_base(opened.folder, weights_digest(opened.folder), str(adapter))
    change.check_fits(opened.config, str(adapter))
    origin = optional_object(opened.folder / ORIGIN)
    if name is None and (name := origin.get("repository")) is None and isinstance(place := origin.get("place"), str):
        name = os.path.normpath(opened.folder.resolve() / place)
    if not name:
        raise UserError(f"{opened.folder}: wasn't imported; --base NAME says which published model the adapter is for")
    if not (config := find_model(name).folder / CONFIG).is_file():  # e.g. of a GGUF file
        written = f"mlx-transformer to-huggingface {shlex.quote(str(base))} OUT{' --mlx-lm' * mlx_lm}"
        raise UserError(f"{name}: has no config.json, as an adapter's base has; {written} writes it for --base OUT")
    theirs = read_object(config)  # DistilBERT's config of ours may be BERT's as well
    if (family := FAMILIES.get(str(theirs.get("model_type")))) is None:
        raise UserError(
            f"{name}: model_type {theirs.get('model_type')!r:.60} is not supported; name the adapter's base"
        )
    if reasons := differences(family, opened.config):
        raise UserError(f"{opened.folder}: {family.name} has no such model: {first_of(reasons)}")
    if mlx_lm:
        changes = changes_of_modules(change, of_mlx_lm(family), opened.config, opened.unread())
        config, tensors = mlx_files(change.config, changes, opened.config.decoder_layers)
        config["model"] = name
    else:
        config, tensors = peft_files(change, family, opened.config, opened.unread(), rank_stabilized)
        config |= {
            "base_model_name_or_path": name,
            "revision": origin.get("revision") if origin.get("repository") else None,
        }
    made = {"library_name": "mlx" if mlx_lm else "peft", "base_model": name, "tags": [change.config.kind]}
    with replace_folder(output) as temporary:
        file, form = (MLX_ADAPTER, "mlx") if mlx_lm else (PEFT_WEIGHTS, "pt")
        write_tensors(temporary / file, tensors, metadata={"format": form})
        (temporary / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        known = {key: lines for key, lines in keys_of(carried(opened.folder)).items() if key != "base_model"}
        kind = f"{'DoRA' if change.config.kind == 'dora' else 'LoRA'} of rank {change.config.rank}"
        put_card(temporary, f"{first_lines(made, known)}\n# An adapter of `{name}`: {kind}\n", output.path)
    return output.path


def _card(place: Found, settings: Settings) -> str:
    """Front matter of an imported model's card: that of its own card, its languages, and its name on the Hub."""
    codes = dict.fromkeys(code.partition("_")[0] for code in settings.get(LANGUAGES, ()))
    ours = keys_of(begin_card(language=list(codes) or None, base_model=place.repository))
    return front_matter({**ours, **keys_of(carried(place.folder, results=True))})


def pads_either_side(folder: str | Path) -> bool:
    """Whether `transformers` gives the same results for padding on the left and on the right, for this folder."""
    return FAMILIES[read_json(Path(folder) / CONFIG)["model_type"]].counts_tokens


IMAGE_MODELS = {"gemma3": "gemma3_text"}
"""{model_type of a model with images: model_type of its language model}"""
PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head": "lm_head"}
OF_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
KEYS_OF_IMAGES = re.compile(r"(text|vision)_config|mm_\w+|architectures|model_type")


def _text_part(published: Published) -> tuple[Published, list[str]]:
    """Extract the language model of a model that also reads images, e.g. Gemma 3 from 4 B up or TranslateGemma.

    Its config.json has the keys for text in `text_config`. Tensors begin with `language_model.model.`, or with
    `model.language_model.` if transformers 5 saved them; those for images are dropped. Returns the language model and a
    note on the dropped tensors; other models unchanged.
    """
    theirs, own = published.config, published.config.get("text_config")
    if theirs.get("model_type") not in list(IMAGE_MODELS) or not isinstance(own, dict):
        return published, []
    config = {key: value for key, value in theirs.items() if not KEYS_OF_IMAGES.fullmatch(key)}
    config |= {**own, "model_type": IMAGE_MODELS[theirs["model_type"]]}
    for key in (KEY, SAME_KEY):
        if isinstance(table := config.get(key), dict):
            config[key] = {_named(name): value for name, value in table.items()}
    left = [match[2] for name in published.tensors if (match := OF_IMAGES.match(name))]
    tensors = {_named(name): array for name, array in published.tensors.items() if not OF_IMAGES.match(name)}
    note = f"{len(left)} tensors for images were not imported: {' and '.join(dict.fromkeys(left))}"
    return replace(published, config=config, tensors=tensors), [note] if left else []


def _named(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return PREFIXES.get(prefix, "") + name.removeprefix(prefix)
