"""Turn the vocabulary files of published models, e.g. source.spm or vocab.json, into a tokenizer.json.

Each family's reader puts the pieces in the order of its ids; `text/sentencepiece_tokenizer.py` writes the file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_transformer.core.checkpoint import CONFIG
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import JOINT, join_texts, side_texts
from mlx_transformer.generation.settings import (
    SOURCE_LANGUAGE,
    SOURCE_LAST,
    TARGET_IN_SOURCE,
    TARGET_LANGUAGE,
    TARGET_STARTS,
)
from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.files import optional_object, read_object, read_text
from mlx_transformer.text.added_tokens import WHOLE, AddedToken, added_tokens, filler
from mlx_transformer.text.published_ids import laid_out, roles_of, target_of
from mlx_transformer.text.sentencepiece import NORMAL, UNKNOWN, SentencePiece, read_sentencepiece, sentencepiece_bytes
from mlx_transformer.text.sentencepiece_tokenizer import sentencepiece_of, tokenizer_json
from mlx_transformer.text.tokenizer import Tokenizer

from .added import ADDED, ROLE_KEYS, checked_settings, listed, makers_tokens, role_names, with_specials, with_tokens
from .encoder_text import WORDS, adopted, of_pair_ends, wordpiece
from .gguf_text import of_sentencepiece
from .json_pieces import byte_level_json, is_pieces, pieces_json
from .languages import (
    LANGUAGE,
    M2M100,
    MBART_25,
    MBART_50,
    OF_LANGUAGES,
    codes_of,
    content_of,
    language_tokens,
    listed_tokens,
    own_code,
)

SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
SOURCE, TARGET, VOCABULARY, TARGET_VOCABULARY = "source.spm", "target.spm", "vocab.json", "target_vocab.json"
PIECES, MERGES = "spiece.model", "merges.txt"
FAIRSEQ, LLAMA = "sentencepiece.bpe.model", "tokenizer.model"
SMALL_100 = "SMALL100Tokenizer"
CONTROL = ("<s>", "</s>", "<pad>")
NAMED = (*CONTROL, "<unk>")
"""The usual names of tokens with a role."""

Reader = Callable[[Path, TransformerConfig, Mapping[str, Any]], str]


def read_text_files(path: Path, config: TransformerConfig, model_type: str) -> tuple[str | None, str]:
    """Make a tokenizer.json from a folder's other files. Returns (text, ""), or (None, the reason if there is one)."""
    encoder = config.architecture == "encoder"
    entries = ENCODER_READERS if encoder else [READERS[model_type]] if model_type in READERS else []
    complete = [read for names, read in entries if all((path / name).is_file() for name in names)]
    if not complete and not encoder and model_type in READERS and _is_published(path):
        complete = [_of_json]
    if config.architecture == "decoder" and (path / LLAMA).is_file() and not (path / JOINT).is_file():
        complete = [lambda folder, _, settings: of_sentencepiece(folder / LLAMA, settings)]
    if not complete:
        return None, ""
    try:
        text = complete[0](path, config, settings_of_text(path))
        check_tokenizer(text, with_ends(config, text) if encoder else config, str(path))
    except UserError as error:
        return None, str(error)
    return text, ""


def _marian(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    """Marian: source and target have SentencePiece models of their own, and a joint or separate vocabularies."""
    source, target = read_sentencepiece(path / SOURCE), read_sentencepiece(path / TARGET)
    vocabulary = _vocabulary(path / VOCABULARY, config.source_vocab_size)
    tokens = makers_tokens(path, settings, NAMED, config.source_vocab_size)
    own = _python_decoder(settings)
    first = {"prefixes": True, **own}
    if not settings.get("separate_vocabs"):
        other = json.loads(_by_vocabulary(target, vocabulary, config, tokens=tokens, more=own))
        return _by_vocabulary(source, vocabulary, config, tokens=tokens, more={**first, "target": other})
    targets = _vocabulary(path / TARGET_VOCABULARY, config.vocab_size)
    both = [token for token in tokens if token.id < config.vocab_size]
    return join_texts(
        _by_vocabulary(source, vocabulary, config, tokens=tokens, more=first),
        _by_vocabulary(target, targets, config, tokens=both, more=own),
    )


def _python_decoder(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Roles for decoding as the Python tokenizers of transformers do: spaces at both ends are removed, and before
    transformers 5 (which writes the key `backend`) an added token has a space on each side."""
    return {"strips": True, **({} if "backend" in settings else {"apart": True})}


def _t5(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    """T5: ids as in the SentencePiece model, followed by the blanks <extra_id_N> in reverse order. MADLAD pads with
    <s>."""
    model, legacy = read_sentencepiece(path / PIECES), settings.get("legacy") is not False
    if not legacy:  # transformers then saves the model without a dummy prefix, and adds the space itself
        model = dataclasses.replace(model, dummy_prefix=True)
    tokens = _with_blanks(model, makers_tokens(path, settings, NAMED, config.vocab_size), config, settings, path)
    ids = {piece.text: id for id, piece in enumerate(model.pieces)}
    pad = ids.get(content_of(settings.get("pad_token", "<pad>")), -1)
    roles = {"pad": pad, "bos": config.bos_id}
    return tokenizer_json(model, roles=roles, tokens=tokens, space_each=legacy, spaces="ends")


def _with_blanks(
    model: SentencePiece, tokens: list[AddedToken], config: TransformerConfig, settings: Mapping[str, Any], path: Path
) -> list[AddedToken]:
    """Add T5's blanks to a folder's added tokens, after the pieces, if they are missing."""
    count = settings.get("extra_ids", 100)
    blanks = [f"<extra_id_{i}>" for i in range(count)] if type(count) is int and 0 <= count <= config.vocab_size else []
    spelled = {token.content for token in tokens} | {piece.text for piece in model.pieces}
    missing = [blank for blank in reversed(blanks) if blank not in spelled] if not spelled & {*blanks} else []
    if len(model.pieces) + len(missing) > config.vocab_size:
        raise UserError(f"{path / PIECES}: has {len(model.pieces)} pieces, and the model {config.vocab_size}")
    return [*tokens, *(AddedToken(id, blank, special=True) for id, blank in enumerate(missing, len(model.pieces)))]


def _pegasus(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    """Pegasus: before the model's pieces come `offset` tokens: padding, end, and masks."""
    model, offset = read_sentencepiece(path / PIECES), settings.get("offset", 103)
    if type(offset) is not int or not 4 <= offset < config.vocab_size:
        raise UserError(f"{path / SETTINGS}: offset {offset!r:.20} doesn't fit a model of {config.vocab_size} ids")
    if [piece.text for piece in model.pieces[:2]] != ["<pad>", "</s>"] or model.ids_of(UNKNOWN) != [2]:
        raise UserError(f"{path / PIECES}: its first pieces are not <pad>, </s> and <unk>")
    masks = ["<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, offset))]
    tokens = ["<pad>", "</s>", *masks, "<unk>", *(piece.text for piece in model.pieces[3:])]
    if len(tokens) > config.vocab_size:
        raise UserError(f"{path / PIECES}: has {len(model.pieces)} pieces, and the model {config.vocab_size} ids")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokens = {token.content: token for token in makers_tokens(path, settings, NAMED, config.vocab_size)}
    tokens |= {mask: AddedToken(vocabulary[mask], mask, special=True) for mask in masks if mask not in tokens}
    return _by_vocabulary(model, vocabulary, config, tokens=[*tokens.values()], lookup=False, spaces="words")


def _bart(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    specification = json.loads(_byte_level(path, config, settings))
    tokens = makers_tokens(path, settings, NAMED, config.vocab_size)
    named = {*NAMED, *role_names(settings, mask=False)}
    return json.dumps(with_tokens(specification, tokens, named), ensure_ascii=False, indent=1) + "\n"


def _byte_level(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    vocabulary = _vocabulary(path / VOCABULARY, config.vocab_size)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise UserError(f"{path / VOCABULARY}: has two tokens with the same id")
    roles = {"pad": vocabulary.get("<pad>", -1), "bos": config.bos_id}
    space = settings.get("add_prefix_space") is True
    return byte_level_json(vocabulary, read_text(path / MERGES), roles, space)


def _m2m100(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    """M2M100 and SMaLL-100: ids from vocab.json, then the languages. NLLB has fairseq's ids."""
    if not (path / VOCABULARY).is_file():
        return _fairseq(path, config, settings)
    vocabulary = _vocabulary(path / VOCABULARY, config.vocab_size)
    usual = " ".join(f"__{code}__" for code in M2M100.split())
    languages = _added(path, config, settings, len(vocabulary), usual)
    model = read_sentencepiece(path / FAIRSEQ)
    tokens = makers_tokens(path, settings, (*NAMED, *languages.keys() - {"<mask>"}), config.vocab_size)
    taken = {token.id for token in tokens if token.content not in languages}  # transformers 5 may give an id twice
    languages = {code: id for code, id in languages.items() if id not in taken}
    every = {**vocabulary, **languages}
    return _by_vocabulary(model, every, config, control=[*languages], tokens=tokens, more=_python_decoder(settings))


def _mbart(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    return _fairseq(path, config, settings, MBART_50 if _is_mbart_50(settings) else MBART_25)


def _is_mbart_50(settings: Mapping[str, Any]) -> bool:
    return str(settings.get("tokenizer_class")).startswith("MBart50")


def _fairseq(path: Path, config: TransformerConfig, settings: Mapping[str, Any], usual: str = "") -> str:
    """The model's pieces with fairseq's ids, then the languages."""
    model, vocabulary = _behind_four(path)
    languages = _added(path, config, settings, len(vocabulary), usual)
    tokens = makers_tokens(path, settings, (*NAMED, *languages.keys() - {"<mask>"}), config.vocab_size)
    every = {**vocabulary, **languages}
    return _by_vocabulary(model, every, config, control=[*languages], tokens=tokens, lookup=False, spaces="ends")


def _behind_four(path: Path) -> tuple[SentencePiece, dict[str, int]]:
    """(the SentencePiece model, {piece: id} as in fairseq: after four special tokens)"""
    model = read_sentencepiece(path / FAIRSEQ)
    if [piece.text for piece in model.pieces[:3]] != ["<unk>", "<s>", "</s>"]:
        raise UserError(f"{path / FAIRSEQ}: its first pieces are not <unk>, <s> and </s>")
    first = {token: id for id, token in enumerate(("<s>", "<pad>", "</s>", "<unk>"))}
    return model, first | {piece.text: id for id, piece in enumerate(model.pieces[3:], len(first))}


def _roberta(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    text = _byte_level(path, config, settings)
    return of_pair_ends(text, ("<s>", "</s>"), settings, path / VOCABULARY, _fills(config))


def _xlm_roberta(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    """XLM-R: the model's pieces with fairseq's ids, then <mask>."""
    model, vocabulary = _behind_four(path)
    vocabulary["<mask>"] = len(vocabulary)
    named = NAMED if _fills(config) else (*NAMED, "<mask>")
    tokens = makers_tokens(path, settings, named, config.vocab_size, mask=not _fills(config))
    if _fills(config) and "<mask>" not in {token.content for token in tokens}:
        tokens.append(AddedToken(vocabulary["<mask>"], "<mask>", special=True, lstrip=True))
    text = _by_vocabulary(model, vocabulary, config, control=["<mask>"], tokens=tokens, lookup=False, spaces="ends")
    return of_pair_ends(text, ("<s>", "</s>"), settings, path / FAIRSEQ)


def _fills(config: TransformerConfig) -> bool:
    """Whether the model restores hidden words, so that <mask> in a text counts as a token."""
    return config.head.kind == "vocabulary"


def _is_published(path: Path) -> bool:
    """Whether a folder's tokenizer.json was written by `transformers`, and not by this project."""
    values = optional_object(path / JOINT)
    return bool(values) and not roles_of(values) and (is_pieces(values) or _is_byte_level(values))


def _is_byte_level(specification: Mapping[str, Any]) -> bool:
    before = specification.get("pre_tokenizer")
    return isinstance(before, dict) and before.get("type") == "ByteLevel"


def _of_json(path: Path, config: TransformerConfig, settings: Mapping[str, Any]) -> str:
    """A folder of transformers 5 with no other vocabulary file than tokenizer.json."""
    if _is_byte_level(read_object(path / JOINT)):
        return adopted(path, settings, fills=True, start=config.bos_id)
    every = listed(path, settings)
    codes = [token.content for token in every.values() if LANGUAGE.fullmatch(token.content)]
    languages = codes if optional_object(path / CONFIG).get("model_type") in OF_LANGUAGES else []
    tokens = makers_tokens(path, settings, (*NAMED, *languages), config.vocab_size)
    own = {*tokens}
    control = [token for token in every.values() if token not in own and token.id < config.vocab_size]
    return pieces_json(path, content_of(settings.get("pad_token", "<pad>")), config.bos_id, tokens, control)


def _added(
    path: Path, config: TransformerConfig, settings: Mapping[str, Any], first: int, usual: str
) -> dict[str, int]:
    """{token: id} of the tokens after the pieces: languages and <mask>."""
    tokens = language_tokens(settings, optional_object(path / ADDED), first, usual)
    wrong = [token for token, id in tokens.items() if type(id) is not int or not first <= id < config.vocab_size]
    if wrong or not tokens:
        reason = f"{wrong[0]} has no id behind its {first} pieces" if wrong else "names no tokens of languages"
        raise UserError(f"{path}: {reason}")
    return tokens


def _by_vocabulary(
    model: SentencePiece,
    vocabulary: Mapping[str, int],
    config: TransformerConfig,
    control: Sequence[str] = (),
    tokens: Sequence[AddedToken] = (),
    lookup: bool = True,
    more: Mapping[str, Any] | None = None,
    spaces: str = "own",
) -> str:
    """Make the tokenizer.json of a SentencePiece model whose ids come from `vocabulary`.

    control: tokens that stand for no text. tokens: added by the maker. lookup: text unknown to the model may have an
    id. more: further entries of `published_ids`. spaces: as for `tokenizer_json`.
    """
    last = max(vocabulary.values(), default=-1)
    vocabulary = {**vocabulary, **{token.content: token.id for token in tokens if token.id <= last}}
    own = {piece.text for piece in model.pieces if piece.type == NORMAL}
    alone = [token.content for token in tokens if token.content not in own]
    pieces, missing = laid_out(model, vocabulary, [*CONTROL, *control, *alone])
    pad = vocabulary.get("<pad>", config.pad_id)
    start = pad if config.bos_id == config.pad_id else config.bos_id
    roles: dict[str, Any] = {"pad": pad, "bos": start, **(more or {})}
    roles |= {"lookup": True} if lookup else {}
    roles |= {"missing": missing} if missing else {}
    return tokenizer_json(pieces, roles=roles, tokens=tokens, spaces=spaces)


def with_ends(config: TransformerConfig, tokenizer: str) -> TransformerConfig:
    """Set the ids of an encoder's start and end token in its config, from the tokenizer: config.json doesn't have
    them."""
    roles = roles_of(json.loads(tokenizer))
    ends = {f"{name}_id": roles[name] for name in ("bos", "eos") if name in roles}
    return dataclasses.replace(config, **ends)


def check_tokenizer(text: str, config: TransformerConfig, where: str) -> None:
    """Raise `UserError` with all differences if the tokenizer doesn't fit the model. where: the error's beginning."""
    tokenizer = Tokenizer(text, where)
    if tokenizer.is_makers:
        return tokenizer.check_fits(config, where)
    ids = {name: (getattr(tokenizer, name), getattr(config, name)) for name in ("pad_id", "bos_id", "eos_id")}
    wrong = [
        f"{name} is {in_tokenizer} in the tokenizer and {in_model} in the model"
        for name, (in_tokenizer, in_model) in ids.items()
        if in_tokenizer != in_model
    ]
    if wrong:
        raise UserError(f"{where}: {'; '.join(wrong)}")
    tokenizer.check_fits(config, where)


def makers_files(
    tokenizer: str, model_type: str, plain: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, bytes]:
    """Files with which transformers tokenizes as the maker's class does: {name: bytes} of tokenizer_config.json, and
    for a Python tokenizer the vocabulary's files; {} for a model that doesn't need its own class.

    plain: tokenizer_config.json for any class. settings: the generation settings."""
    sides = side_texts(tokenizer) or {"source": tokenizer}
    source, *others = map(json.loads, sides.values())
    roles, listed_ids = roles_of(source), listed_tokens(source)
    names = {id: token for token, id in listed_ids.items()}
    languages = codes_of(listed_ids, len(names) and max(names) + 1)
    target = others[0] if others else target_of(source)
    values = dict(plain)
    if model_type not in (*OF_LANGUAGES, "marian") or not roles or (target is None) == (model_type == "marian"):
        return {}
    if not roles.get("strips"):
        last = settings.get(SOURCE_LAST) is True
        mbart = "MBartTokenizer" if last else "MBart50Tokenizer"
        values["tokenizer_class"] = mbart if model_type == "mbart" else "NllbTokenizer"
        values |= {"legacy_behaviour": True} if last and model_type != "mbart" else {}
        spoken = [names[id] for id in sorted(languages.values())]
        values["additional_special_tokens"] = [*spoken, *values.get("additional_special_tokens", ())]
        return {SETTINGS: _json(values)} if languages and model_type != "marian" else {}
    every = added_tokens(with_specials(source, published=True))
    whole, known = {*roles.get(WHOLE, ())}, {plain.get(key) for key in ROLE_KEYS}
    kept = [token.entry(token.special) for token in every if token.id in whole or token.content in known]
    mine = {entry.pop("id"): entry for entry in kept}
    values |= {"added_tokens_decoder": mine, "split_special_tokens": plain["split_special_tokens"] and not whole}
    values |= {} if roles.get("apart") else {"backend": "custom"}
    values.pop("cls_token", None)
    if model_type == "marian":
        values |= {"tokenizer_class": "MarianTokenizer", "separate_vocabs": bool(others)}
        models, first = {SOURCE: source, TARGET: target}, len(names) + len(source["model"]["vocab"])
        vocabularies = {VOCABULARY: source, **dict(zip((TARGET_VOCABULARY,), others, strict=False))}
    else:
        values["tokenizer_class"], codes = "M2M100Tokenizer", M2M100.split()
        first = min((id - codes.index(code) for code, id in languages.items() if code in codes), default=0)
        models, vocabularies = {FAIRSEQ: source}, {VOCABULARY: source}
    files = {SETTINGS: _json(values)}
    for file, side in models.items():
        if side is None or (model := sentencepiece_of(side, reordered=True)) is None:
            return {}
        files[file] = sentencepiece_bytes(model)
    return files | {file: _json(_pieces(side, first)) for file, side in vocabularies.items()}


def _pieces(specification: Mapping[str, Any], first: int) -> dict[str, int]:
    """{token: id} of ids below `first`, without fillers, as in vocab.json."""
    own = specification["model"]["vocab"]
    texts = list(own) if isinstance(own, dict) else [text for text, _ in own]
    named = {*listed_tokens(specification).values()}
    known = {text if id in named else text.removeprefix(" "): id for id, text in enumerate(texts[:first])}
    return {text: id for text, id in known.items() if text != filler(id).content}


def _json(values: Any) -> bytes:
    return (json.dumps(values, ensure_ascii=False, indent=2) + "\n").encode()


def places_of_languages(path: Path, model_type: str) -> dict[str, bool]:
    """Settings (`generation/settings.py`) for the places of language tokens; {}: before source and output.

    SMaLL-100 reads the target language before the source. mBART reads the source language after the source, and the
    target language as its decoder's first token. NLLB with `legacy_behaviour` also has the source language last.
    """
    settings = settings_of_text(path)
    if model_type == "mbart" and not _is_mbart_50(settings):
        return {SOURCE_LAST: True, TARGET_STARTS: True}
    if settings.get("tokenizer_class") == SMALL_100:
        return {TARGET_IN_SOURCE: True}
    return {SOURCE_LAST: True} if model_type == "m2m_100" and settings.get("legacy_behaviour") else {}


def languages_of_text(
    path: Path, languages: Mapping[str, int], config: TransformerConfig, settings: Mapping[str, Any]
) -> dict[str, str]:
    """The default languages, from tokenizer_config.json (`src_lang`, `tgt_lang`) or from the decoder's start token; {}
    without defaults. languages: {code: id}. settings: the generation settings."""
    told, found = settings_of_text(path), {}
    for name, key in ((SOURCE_LANGUAGE, "src_lang"), (TARGET_LANGUAGE, "tgt_lang")):
        code = told.get(key)
        if isinstance(code, str) and (own := own_code(code, languages)) is not None:
            found[name] = own
    if settings.get(TARGET_STARTS):
        start = settings.get("start_id", config.bos_id)
        begun = [code for code, id in languages.items() if id == start]
        found |= {TARGET_LANGUAGE: begun[0]} if begun else {}
    return found


def displaced_languages(path: Path, config: TransformerConfig, languages: Collection[str]) -> list[str]:
    """Note the languages of M2M100 whose ids transformers 5 has given to added tokens."""
    if not (path / VOCABULARY).is_file():
        return []
    first, usual = len(read_object(path / VOCABULARY)), " ".join(f"__{code}__" for code in M2M100.split())
    every = codes_of(_added(path, config, settings_of_text(path), first, usual), config.vocab_size)
    lost = [code for code in every if code not in languages]
    return [f"languages whose ids are those of added tokens: {first_of(lost, ', ')}"] if lost else []


def settings_of_text(path: Path) -> Mapping[str, Any]:
    """Read tokenizer_config.json, with defaults from special_tokens_map.json and the class from config.json. Raises
    `UserError` for an entry that can't be a token."""
    files = [checked_settings(optional_object(path / name), path / name) for name in (SPECIAL, SETTINGS)]
    return {"tokenizer_class": optional_object(path / CONFIG).get("tokenizer_class"), **files[0], **files[1]}


def _vocabulary(path: Path, rows: int) -> dict[str, int]:
    values = read_object(path)
    if not values or not all(type(id) is int and 0 <= id < rows for id in values.values()):
        raise UserError(f"{path}: is no vocabulary, or has ids beyond the model's {rows}")
    return values


READERS: dict[str, tuple[tuple[str, ...], Reader]] = {
    "marian": ((SOURCE, TARGET, VOCABULARY), _marian),
    "t5": ((PIECES,), _t5),
    "mt5": ((PIECES,), _t5),
    "umt5": ((PIECES,), _t5),
    "pegasus": ((PIECES,), _pegasus),
    "bart": ((VOCABULARY, MERGES), _bart),
    "mbart": ((FAIRSEQ,), _mbart),
    "m2m_100": ((FAIRSEQ,), _m2m100),
}
"""{model_type: (files that must be there, their reader)}"""
ENCODER_READERS: list[tuple[tuple[str, ...], Reader]] = [
    ((JOINT,), lambda path, config, settings: adopted(path, settings, _fills(config))),
    ((WORDS,), lambda path, config, settings: wordpiece(path, settings, config.vocab_size, _fills(config))),
    ((FAIRSEQ,), _xlm_roberta),
    ((VOCABULARY, MERGES), _roberta),
]
"""(files, reader) for encoders, which may have several kinds of vocabularies; the first with its files is used."""
