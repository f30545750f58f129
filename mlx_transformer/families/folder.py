"""Hugging Face model folders: config.json, model.safetensors, generation_config.json, tokenizer.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_transformer.core.card import Form, kind_of, write_card
from mlx_transformer.core.checkpoint import HUGGING_FACE
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import CONFIG, GGUF, MODULES, ONNX_CONFIG, WEIGHTS
from mlx_transformer.core.heads import DENSE, EMBEDDING
from mlx_transformer.core.inputs import MASK, SOURCE_IDS, companions
from mlx_transformer.core.int8_scales import INT8_SCALES
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.quantization import KEY, SAME_KEY, stored_tensors, to_config
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE, side_texts
from mlx_transformer.core.tokenizer_files import JOINT as TOKENIZER
from mlx_transformer.core.tokenizer_files import NAMES as TOKENIZERS
from mlx_transformer.decoding.steps import banned_ids
from mlx_transformer.generation.settings import (
    CHAT_TEMPLATES,
    DEFAULT,
    SETTINGS,
    SOURCE_LANGUAGE,
    SPECIAL_TOKENS,
    TARGET_LANGUAGE,
)
from mlx_transformer.system.durable import Target, replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import optional_object, parse_json, read_object, read_text
from mlx_transformer.system.manifest import MANIFEST
from mlx_transformer.system.tensors import write_tensors
from mlx_transformer.system.torch_files import write_torch_tensors
from mlx_transformer.text.added_tokens import SILENT, added_tokens
from mlx_transformer.text.published_ids import roles_of
from mlx_transformer.text.tokenizer import is_makers

from .added import ADDED, with_specials
from .engine import Published
from .generation import ADDITIONAL, OF_PROCESSORS, published_settings
from .languages import codes_of, listed_tokens
from .mlx_lm import keys_of_mlx_lm
from .sentence_folder import HEADS, LIMITS, PROMPTS, dense_weights, head_weights, sentence_files
from .text import check_tokenizer, makers_files, read_text_files
from .weights import FORMS, open_weights

GENERATION = "generation_config.json"
ONE_VOCABULARY = "has a vocabulary for each language; a folder for transformers holds one tokenizer.json"
GRAPH_FILE = re.compile(r"onnx/[\w.-]+\.(onnx|onnx_data|json)")
BESIDE_GRAPHS = re.compile(r"(?!.*\.index\.)[\w.-]+\.json|shortlist\.bin")
"""Files of a folder that export wrote, e.g. genai_config.json: its manifest lists them all."""
SMALL = (CONFIG, GENERATION, SETTINGS, MANIFEST, *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json")
SMALL += ("added_tokens.json", "vocab.json", "source.spm", "target.spm", "spiece.model", "tokenizer.model")
SMALL += ("sentencepiece.bpe.model",)
SMALL += (
    CHAT_TEMPLATE,
    OF_PROCESSORS,
    "merges.txt",
    "target_vocab.json",
    "vocab.txt",
    INT8_SCALES,
    EMBEDDING,
    DENSE,
    MODULES,
    LIMITS,
    PROMPTS,
)
SMALL += tuple(HEADS.values())
"""The files that are fetched from the Hub beside the weights, where they are there."""
PART = re.compile(r"\d+_(Pooling|Dense)/(config\.json|model\.safetensors|pytorch_model\.bin)")
"""Files of a sentence-transformers folder for the modules after the encoder."""
TEMPLATE = re.compile(rf"{ADDITIONAL}/[\w.-]+\.jinja")
PIPELINE = """from transformers import pipeline
pipe = pipeline("{}", "ORG/NAME or FOLDER")
print(pipe("A sentence."))"""
TRANSLATE = """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, tokenizer = (each.from_pretrained("ORG/NAME or FOLDER") for each in (AutoModelForSeq2SeqLM, AutoTokenizer))
print(tokenizer.batch_decode(model.generate(**tokenizer("A sentence.", return_tensors="pt"))))"""
EMBED = """from sentence_transformers import SentenceTransformer
model = SentenceTransformer("ORG/NAME or FOLDER")
print(model.encode("A sentence."))"""
"""The card's section on usage; transformers 5 has no pipeline for encoder-decoders."""


def _form(folder: Path, config: TransformerConfig) -> Form:
    pipeline = kind_of(folder, config).pipeline
    library, use = {
        "translation": ("transformers", TRANSLATE),
        "sentence-similarity": ("sentence-transformers", EMBED),
    }.get(pipeline, ("transformers", PIPELINE.format(pipeline)))
    return Form(library, ("transformer",), f"```python\n{use}\n```")


def read_folder(path: Path) -> Published:
    """Open a folder. Each tensor is read only when its numbers are needed.

    Raises `UserError` for missing and damaged files.
    """
    if not path.is_dir():
        raise UserError(f"{path}: {'is a file, not a folder with a model' if path.exists() else 'no such folder'}")
    if not (path / CONFIG).is_file():
        if files := sorted(path.glob(f"*{GGUF}")):
            raise UserError(f"{path}: a folder of GGUF files; name one of them: {files[0]}")
        raise UserError(f"{path}: not a Hugging Face model folder ({CONFIG} missing)")
    config, generation = read_object(path / CONFIG), optional_object(path / GENERATION)
    return Published(path, config, generation, open_weights(path))


def read_tokenizer(path: Path, config: TransformerConfig, model_type: str) -> tuple[str | None, list[str]]:
    """Return (text of a tokenizer.json that fits the model, ""), or (None, a note of the reason).

    It is made from the family's own vocabulary files, or without them from the folder's tokenizer.json, which may cut
    text differently. Raises `UserError` if that file is damaged, as it may be the model's.
    """
    made, reason = read_text_files(path, config, model_type)
    if made is not None:
        return made, []
    file, reasons = path / TOKENIZER, [reason] if reason else []
    if file.is_file() and not reason:
        text = read_text(file)
        hint = "restore it from a copy, or remove it: the model takes ids then"
        values = parse_json(text, f"{file}: damaged, or not JSON", hint)
        if isinstance(values, dict) and roles_of(values):  # written by `write_folder`
            text = json.dumps(with_specials(values, published=False), ensure_ascii=False, indent=1) + "\n"
        try:
            check_tokenizer(text, config, str(file))
            return text, []
        except UserError as error:
            reasons.append(str(error))
    return None, [f"no tokenizer ({'; '.join(reasons) or f'{path} has no {TOKENIZER}'})"]


def read_languages(path: Path, config: TransformerConfig, tokenizer: str | None) -> dict[str, int]:
    """Return {code: id} of a published tokenizer's language tokens. Raises `UserError` for damaged files.

    tokenizer: the tokenizer.json that was made of it.
    """
    languages: Mapping[Any, Any] = {}
    if tokenizer is not None or (path / TOKENIZER).is_file():
        languages = listed_tokens(read_object(path / TOKENIZER) if tokenizer is None else json.loads(tokenizer))
    elif (path / ADDED).is_file():
        languages = read_object(path / ADDED)
    return codes_of(languages, min(config.vocab_size, config.source_vocab_size))


def generation_config(c: TransformerConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation_config.json: greedy by default, as here, plus the model's own settings. Pad and bos are never
    chosen."""
    return {
        "pad_token_id": c.pad_id,
        "bos_token_id": c.bos_id,
        "eos_token_id": c.eos_id,
        **({"decoder_start_token_id": settings.get("start_id", c.bos_id)} if c.has_encoder else {}),
        "bad_words_ids": [[id] for id in banned_ids(c)],
        "max_length": c.max_positions,
        "do_sample": False,
        "num_beams": 1,
        "use_cache": True,
        **published_settings(settings, c),
    }


def tokenizer_config(
    config: TransformerConfig,
    tokenizer: str,
    embedding: TextEmbedding | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return tokenizer_config.json for this tokenizer.json: its special tokens, and no clean-up of text.

    embedding: limits the length of a text vector's text. settings: may have default languages."""
    specification = json.loads(tokenizer)
    contents = {entry["id"]: entry["content"] for entry in specification.get("added_tokens", [])}
    known, role_ids = {content: id for id, content in contents.items()}, roles_of(specification)
    roles = {"bos_token": config.bos_id, "eos_token": config.eos_id, "pad_token": config.pad_id}
    ends = {"cls_token": config.bos_id, "sep_token": config.eos_id}
    if config.architecture == "encoder":
        roles = {"pad_token": config.pad_id, **ends} if contents.get(config.bos_id) == "[CLS]" else roles | ends
    elif config.has_encoder and role_ids:  # published, whose decoder may start with another token
        start = known.get("<s>", config.pad_id)
        roles["bos_token"] = start
        roles |= {"cls_token": start, "sep_token": config.eos_id}
        roles = roles if start != config.pad_id else {role: roles[role] for role in ("eos_token", "pad_token")}
    roles |= {
        "unk_token": role_ids.get("unk", known.get("<unk>")),
        "mask_token": role_ids.get("mask", known.get("<mask>", known.get("<mask_2>"))),
    }
    special: dict[str, Any] = {role: contents[id] for role, id in roles.items() if id in contents}
    special = {**settings[SPECIAL_TOKENS]} if SPECIAL_TOKENS in settings else special
    if embedding is not None and contents:  # sentence-transformers needs some padding token
        special.setdefault("pad_token", next(iter(contents.values())))
    flags = {token.content: token.special for token in added_tokens(specification)}
    silent = [contents[id] for id in role_ids.get(SILENT, ()) if contents[id] not in special.values()]
    if silent and flags[silent[0]]:
        special["additional_special_tokens"] = silent
    languages = {"src_lang": SOURCE_LANGUAGE, "tgt_lang": TARGET_LANGUAGE}
    special |= {theirs: settings[ours] for theirs, ours in languages.items() if ours in settings}
    # Tokens that count as an id in a text must not be special if special tokens are split.
    whole = [*role_ids.get(SILENT, ())]
    masks = config.architecture == "encoder" and "mask_token" in special and config.head.kind == "vocabulary"
    whole += [roles["mask_token"]] if masks else []
    splits = not is_makers(specification) and not any(flags[contents[id]] for id in whole)
    # Without this key transformers takes the space from tokenizer.json.
    spaced = (specification.get("pre_tokenizer") or {}).get("add_prefix_space")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_input_names": [SOURCE_IDS.published, *(entry.published for entry in companions(config)), MASK],
        "model_max_length": min(config.max_positions, (embedding and embedding.max_length) or config.max_positions),
        "padding_side": "left" if config.architecture == "decoder" else "right",
        "clean_up_tokenization_spaces": False,
        **({"add_prefix_space": True} if spaced else {}),
        # "</s>" in a text is text, but <mask> is what an encoder is to fill in.
        "split_special_tokens": splits,
    }


def write_folder(
    out: Target,
    model_config: TransformerConfig,
    theirs: tuple[Mapping[str, Any], Mapping[str, Any]],
    tokenizer: str | None,
    settings: Mapping[str, Any],
    card: str,
    embedding: TextEmbedding | None = None,
    mlx_lm: bool = False,
) -> Path:
    """Write all files durably, without overwriting other files. theirs: the result of `exported`. card: the first lines
    of the model card. mlx_lm: write the index and the sorted config of mlx-lm. Raises `UserError` like `claim`, and if
    the disk fails."""
    output, (config, weights) = claim(out, HUGGING_FACE), theirs
    tensors, quantization = stored_tensors(weights)
    if quantization:
        entry = to_config(quantization)
        config = {**config, KEY: entry, SAME_KEY: entry}
    texts: dict[str, Any] = {CONFIG: config}
    if mlx_lm:
        texts[CONFIG] = dict(sorted({**config, **keys_of_mlx_lm(config)}.items()))
        sizes = {"total_size": sum(x.nbytes for x in tensors.values())}
        sizes["total_parameters"] = sum(math.prod(x.shape) for x in weights.values())
        texts[FORMS[0].index] = {"metadata": sizes, "weight_map": dict.fromkeys(sorted(tensors), WEIGHTS)}
    if model_config.has_decoder:
        texts[GENERATION] = generation_config(model_config, settings)
    with replace_folder(output) as temporary:
        if tokenizer:
            texts |= _tokenizer_files(temporary, model_config, config["model_type"], tokenizer, settings, embedding)
        if embedding is not None:
            texts |= sentence_files(embedding, model_config.d_model, model_config.max_positions)
            for name, arrays in dense_weights(embedding):
                (temporary / name).mkdir()
                write_tensors(temporary / name / WEIGHTS, arrays, metadata={"format": "pt"})
            for name, arrays in head_weights(embedding):
                write_torch_tensors(temporary / name, arrays)
        for name, template in settings.get(CHAT_TEMPLATES, {}).items():
            file = temporary / (CHAT_TEMPLATE if name == DEFAULT else f"{ADDITIONAL}/{name}.jinja")
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(template.encode())
        for name, values in texts.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        # Both transformers and mlx-lm want to be told.
        write_tensors(temporary / WEIGHTS, tensors, metadata={"format": "mlx" if mlx_lm else "pt"})
        write_card(temporary, model_config, _form(temporary, model_config), card, output.path)
    return output.path


def _tokenizer_files(
    folder: Path,
    config: TransformerConfig,
    model_type: str,
    tokenizer: str,
    settings: Mapping[str, Any],
    embedding: TextEmbedding | None,
) -> dict[str, Any]:
    """Write a tokenizer's files; return {name: contents} of those that are still to be written.

    The maker's own files are among them if they are read back as this tokenizer. Raises `UserError` for two
    vocabularies that only this project has."""
    sides = side_texts(tokenizer)
    source = json.loads(tokenizer if sides is None else sides["source"])
    if roles_of(source):  # a maker's stays as it is
        source = with_specials(source, published=True)
    text = json.dumps(source, ensure_ascii=False, indent=1) + "\n" if roles_of(source) else tokenizer
    plain = tokenizer_config(config, text, embedding, settings)
    own = makers_files(tokenizer, model_type, plain, settings)
    if sides is None:
        (folder / TOKENIZER).write_bytes(text.encode())
    if len(own) > 1:
        for name, data in {**own, CONFIG: json.dumps({"model_type": model_type}).encode()}.items():
            (folder / name).write_bytes(data)
        if read_text_files(folder, config, model_type)[0] != tokenizer:
            for name in own:
                (folder / name).unlink()
            own = {}
    if sides is not None and not own:
        raise UserError(f"the model {ONE_VOCABULARY}")
    return {"tokenizer_config.json": json.loads(own["tokenizer_config.json"]) if own else plain}


def needed(files: Iterable[str]) -> list[str]:
    """Return the files of a repository that a model needs, config.json first; [] without a config.json. If the weights
    are there in several formats, only those that `open_weights` reads are needed. Graphs of this project's ONNX folders
    are included."""
    every = list(files)
    files = [file for file in every if "/" not in file]
    graphs = [file for file in every if GRAPH_FILE.fullmatch(file)]
    if CONFIG not in files:
        return []
    parts = [file for file in every if PART.fullmatch(file)] if MODULES in files else []
    small = [file for file in SMALL if file in files] + parts + [file for file in every if TEMPLATE.fullmatch(file)]
    if ONNX_CONFIG in files:
        return [*small, *(file for file in files if BESIDE_GRAPHS.fullmatch(file) and file not in small), *graphs]
    for form in FORMS:
        if form.name in files:
            return [*small, form.name]
        if form.index in files:
            stem, _, kind = form.name.partition(".")
            shard = re.compile(re.escape(stem) + r"-\d+-of-\d+\." + re.escape(kind))
            return [*small, form.index, *(file for file in files if shard.fullmatch(file))]
    return small
