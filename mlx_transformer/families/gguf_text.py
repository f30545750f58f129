"""Convert vocabularies between GGUF keys and a tokenizer.json of transformers.

tokenizer.ggml.model   kind                 keys
gpt2                   byte-level BPE       tokens, merges, pre: name of the regular expressions that split text first
llama                  SentencePiece BPE    tokens, scores, from which the merges are derived

Source: llama.cpp's `llama-vocab.cpp`, and published files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError, shortened
from mlx_transformer.text.added_tokens import filler
from mlx_transformer.text.sentencepiece import BPE, read_sentencepiece

from .added import listed
from .json_pieces import components

if TYPE_CHECKING:
    from mlx_transformer.core.config import TransformerConfig

KEYS = "tokenizer.ggml"
TEMPLATE = "tokenizer.chat_template"
MARK, BYTES = "\u2581", re.compile("<0x[0-9A-F]{2}>")
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
MERGED = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
"""Gemma's pre-tokenizer, which changes nothing: its normalizer has replaced all spaces by `MARK`."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{parts}" for parts in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*")]
REST_OF_CASED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HUNYUAN = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT2: Sequence[str] = ()
"""No expression: the component ByteLevel has GPT-2's built in."""
QWEN2 = (rf"{ENDINGS}{WORDS}|\p{{N}}{REST}",)
THREE_DIGITS = (rf"{ENDINGS}{WORDS}|\p{{N}}{{1,3}}{REST}",)
TEKKEN = (rf"{CASED[0]}|{CASED[1]}|\p{{N}}{REST_OF_CASED}",)
GPT4O = (rf"{CASED[0]}{ENDINGS}?|{CASED[1]}{ENDINGS}?|\p{{N}}{{1,3}}{REST_OF_CASED}",)
DIGITS = "digits"
"""Split off each digit, then split as GPT-2 does."""
CUT: dict[str, Sequence[str]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mellum", "exaone4"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), QWEN2),
    **dict.fromkeys(("gpt-4o",), GPT4O),
    **dict.fromkeys(("tekken",), TEKKEN),
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3"), HUNYUAN),
}
"""{tokenizer.ggml.pre: regular expressions that split text, applied in this order}"""
STARTED = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Their texts begin with the start token (unless the file says otherwise), and a word in the vocabulary is not merged
from parts (`ignore_merges`)."""
COMPOSED = ("qwen2", "deepseek-r1-qwen", "megrez")
"""Their text is normalised to NFC, as in the published tokenizer.json; llama.cpp leaves it as it is."""


def text_files(pairs: Mapping[str, Any], where: str) -> tuple[dict[str, str], list[str]]:
    """Make tokenizer.json, tokenizer_config.json and chat templates from a GGUF's keys.

    Returns {file name: text}, and notes: {} and one note if the GGUF has no vocabulary. where: the GGUF's path, for
    errors. Raises `UserError` for an unsupported kind of vocabulary, and for a damaged one.
    """
    published = pairs.get("tokenizer.huggingface.json")
    kind = pairs.get(f"{KEYS}.model", "no_vocab")
    if isinstance(kind, str) and kind in ("no_vocab", "none"):
        return {}, ["no tokenizer (the file has none)"]
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise UserError(f"{where}: {KEYS}.model is {kind!r:.60}; supported: gpt2, llama (SentencePiece's BPE)")
    vocabulary = _Vocabulary(pairs, where)
    texts = {"tokenizer.json": published if isinstance(published, str) else vocabulary.json(kind)}
    texts["tokenizer_config.json"] = _json({"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.roles()})
    for key, template in pairs.items():
        name = key.removeprefix(f"{TEMPLATE}.")
        if key == TEMPLATE and isinstance(template, str):
            texts["chat_template.jinja"] = template
        elif name != key and name.replace("_", "").replace("-", "").isalnum() and isinstance(template, str):
            texts[f"additional_chat_templates/{name}.jinja"] = template
    return texts, []


def of_sentencepiece(path: Path, settings: Mapping[str, Any]) -> str:
    """Make the tokenizer.json of a folder with only a SentencePiece BPE model (tokenizer.model), e.g. Llama 2 or Gemma.

    path: tokenizer.model. settings: the folder's tokenizer_config.json. Raises `UserError` for unigram models, and for
    models that normalise text.
    """
    model, where = read_sentencepiece(path), str(path)
    wrong = ["it is a unigram model"] if model.model_type != BPE else []
    wrong += ["it replaces characters by a table"] if model.charsmap else []
    wrong += ["it takes several spaces as one"] if model.remove_extra_whitespace else []
    if wrong:
        raise UserError(f"{where}: {'; '.join(wrong)}: put the tokenizer.json of `transformers` beside it")
    pairs: dict[str, Any] = {f"{KEYS}.tokens": [piece.text for piece in model.pieces]}
    pairs |= {f"{KEYS}.scores": [piece.score for piece in model.pieces], f"{KEYS}.add_space_prefix": model.dummy_prefix}
    roles = zip(("unknown", "bos", "eos", "padding"), model.special, strict=True)
    ids = {role: id for role, id in roles if id >= 0}
    pairs |= {f"{KEYS}.{role}_token_id": id for role, id in ids.items()}
    pairs |= {f"{KEYS}.{key}": settings[key] for key in ("add_bos_token", "add_eos_token") if key in settings}
    pairs[f"{KEYS}.token_type"] = [
        UNUSED if piece.type == CONTROL and id not in ids.values() else piece.type
        for id, piece in enumerate(model.pieces)
    ]
    specification = json.loads(_Vocabulary(pairs, where).json("llama"))
    known = {entry["id"]: entry for entry in specification["added_tokens"]}
    for entry in known.values():  # user-defined symbols are looked for after spaces have become marks
        entry["normalized"] = not entry["special"] and not model.dummy_prefix
    known |= {id: token.entry(token.special) for id, token in listed(path.parent, settings).items()}
    size = len(model.pieces)
    known |= {id: filler(id).entry(True) for id in range(size, max(known, default=0)) if id not in known}
    specification["added_tokens"] = [known[id] for id in sorted(known)]
    if settings.get("legacy") is False and model.dummy_prefix:  # a space before the text, none after special tokens
        specification["normalizer"] = None
        mark = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False}
        specification["pre_tokenizer"] = mark
    return _json(specification)


def _json(values: Any) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"


class _Vocabulary:
    def __init__(self, pairs: Mapping[str, Any], where: str):
        self._pairs, self._where = pairs, where
        self.tokens: list[str] = self._list("tokens")
        self.ids, count = {token: id for id, token in enumerate(self.tokens)}, len(self.tokens)
        types = pairs.get(f"{KEYS}.token_type")
        self.types: list[int] = [NORMAL] * count if types is None else self._list("token_type", count)
        if len(self.ids) != count:
            raise self._wrong("tokens has a token twice")

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._where}: {KEYS}.{what}: damaged; restore it from a copy")

    def _list(self, key: str, count: int | None = None) -> list[Any]:
        """Read a list of strings, or of `count` numbers."""
        values = self._pairs.get(f"{KEYS}.{key}")
        found = values.tolist() if isinstance(values, np.ndarray) else values
        kinds = (str,) if count is None else (int, float)
        if not isinstance(found, list) or not found or not all(type(value) in kinds for value in found):
            raise self._wrong(f"{key} is no list of {'strings' if count is None else 'numbers'}")
        if count is not None and len(found) != count:
            raise self._wrong(f"{key} has {len(found)} values for {count} tokens")
        return found

    def id_of(self, role: str) -> int | None:
        id = self._pairs.get(f"{KEYS}.{role}_token_id")
        if id is None:
            return None
        if type(id) is not int or not 0 <= id < len(self.tokens):
            raise self._wrong(f"{role}_token_id is {id!r:.40}, but there are {len(self.tokens)} tokens")
        return id

    def roles(self) -> dict[str, Any]:
        """The tokens with a role, e.g. {"bos_token": "<s>"}, as in tokenizer_config.json."""
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {f"{theirs}_token": self.id_of(ours) for theirs, ours in names.items()}
        return {role: self.tokens[id] for role, id in ids.items() if id is not None}

    def json(self, kind: str) -> str:
        parts = self._byte_level() if kind == "gpt2" else self._pieces()
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [
            {"id": id, "content": token, **flags, "special": kind != USER_DEFINED}
            for id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
        return _json({"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts})

    def _model(self, merges: list[list[str]], **more: Any) -> dict[str, Any]:
        model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
        model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        return {**model, **more, "vocab": self.ids, "merges": merges}

    def _ends(self, before: bool) -> dict[str, Any] | None:
        """The template that adds start and end tokens, or None. before: add the start token if the file doesn't say."""
        single: list[Any] = [{"Sequence": {"id": "A", "type_id": 0}}]
        pair: list[Any] = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        special = {}
        for role, wanted in (("bos", before), ("eos", False)):
            id = self.id_of(role)
            if id is None or self._pairs.get(f"{KEYS}.add_{role}_token", wanted) is not True:
                continue
            token = self.tokens[id]
            special[token] = {"id": token, "ids": [id], "tokens": [token]}
            entry = [{"SpecialToken": {"id": token, "type_id": 0}}]
            single, pair = (entry + x if role == "bos" else x + entry for x in (single, pair))
        if not special:
            return None
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}

    def _byte_level(self) -> dict[str, Any]:
        pre = self._pairs.get(f"{KEYS}.pre", "default")
        if not isinstance(pre, str) or pre not in CUT:
            raise UserError(
                f"{self._where}: {KEYS}.pre is {pre!r:.60}, an unsupported pre-tokenizer; supported: {', '.join(CUT)}"
            )
        merges = [pair.split(" ") for pair in self._list("merges")]
        if wrong := [" ".join(pair) for pair in merges if len(pair) != 2]:
            raise self._wrong(f"merges: {shortened(wrong[0], 40)!r} is no pair of tokens")
        known, space = self.ids, self._pairs.get(f"{KEYS}.add_space_prefix") is True
        if unknown := [pair for pair in merges if not {*pair, "".join(pair)} <= known.keys()]:
            raise self._wrong(f"merges: {shortened(' '.join(unknown[0]), 40)!r} are no tokens")
        byte_level = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": False}
        cut: list[Any] = (
            [{"type": "Digits", "individual_digits": True}]
            if CUT[pre] == DIGITS
            else [
                {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
                for each in CUT[pre]
            ]
        )
        cut.append({**byte_level, "use_regex": CUT[pre] in (GPT2, DIGITS)})
        return {
            "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut} if len(cut) > 1 else cut[0],
            "post_processor": self._ends(pre in STARTED) or {**byte_level, "trim_offsets": False},
            "decoder": {**byte_level, "use_regex": True},
            "model": self._model(merges, ignore_merges=pre in STARTED),
        }

    def _pieces(self) -> dict[str, Any]:
        prefix = self._pairs.get(f"{KEYS}.add_space_prefix", True) is True
        first = [{"type": "Prepend", "prepend": MARK}] if prefix else []
        back: list[Any] = [{"type": "Replace", "pattern": {"String": MARK}, "content": " "}]
        back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
        back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        unknown = self.id_of("unknown")
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*first, SPACES]},
            "pre_tokenizer": None,
            "post_processor": self._ends(True),
            "decoder": {"type": "Sequence", "decoders": back},
            "model": self._model(
                _merges(self.tokens, self.types, self._list("scores", len(self.tokens))),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            ),
        }


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """All pairs of pieces that form a piece, by falling score of that piece; ties in the order of `transformers`."""
    ids = {token: id for id, token in enumerate(tokens) if types[id] in (NORMAL, UNUSED)}
    pairs = [
        (-scores[id], -i, i - len(token), id, ids[token[:i]], ids[token[i:]])
        for token, id in ids.items()
        for i in range(1, len(token))
        if token[:i] in ids and token[i:] in ids
    ]
    return [[tokens[left], tokens[right]] for *_, left, right in sorted(pairs)]


UNSAID = "no tokenizer (llama.cpp doesn't have its pre-tokenizer)"


def text_keys(text: str, config: TransformerConfig) -> tuple[dict[str, Any], list[str]]:
    """Convert a tokenizer.json to GGUF keys, and notes.

    A tokenizer that llama.cpp can't have gives the keys of a file without a vocabulary, and one note.
    """
    values = json.loads(text)
    model = values["model"]
    vocabulary = model.get("vocab")
    before = components(values.get("pre_tokenizer"), "pretokenizers")
    after = components(values.get("normalizer"), "normalizers")
    pieces = after[-1:] == [SPACES] and before in ([], [MERGED])
    pre = None if pieces else _name_of_cut(before, model.get("ignore_merges") is True)
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or (pre is None and not pieces):
        return {f"{KEYS}.model": "no_vocab"}, [UNSAID]
    tokens = [f"[PAD{id}]" for id in range(config.vocab_size)]
    types = np.full(len(tokens), UNUSED, np.int32)
    for token, id in vocabulary.items():
        tokens[id], types[id] = token, BYTE if pieces and BYTES.fullmatch(token) else NORMAL
    for entry in values.get("added_tokens") or ():
        id, content = entry["id"], entry["content"]
        tokens[id], types[id] = content, CONTROL if entry.get("special") else USER_DEFINED
    unknown = vocabulary.get(model.get("unk_token"))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    pairs: dict[str, Any] = {f"{KEYS}.model": "llama" if pieces else "gpt2", f"{KEYS}.pre": pre or "default"}
    pairs |= {f"{KEYS}.tokens": tokens, f"{KEYS}.token_type": types}
    if pieces:
        pairs[f"{KEYS}.scores"] = _scores(tokens, merges)
    else:
        pairs[f"{KEYS}.merges"] = merges
    if unknown is not None:
        pairs[f"{KEYS}.unknown_token_id"] = unknown
        types[unknown] = UNKNOWN if pieces else types[unknown]
    ends, ids = json.dumps(values.get("post_processor")), {"bos": config.bos_id, "eos": config.eos_id}
    pairs |= {f"{KEYS}.add_{role}_token": json.dumps(tokens[ids[role]]) in ends for role in ("bos", "eos")}
    prefix = len(after) > 1 if pieces else before[-1].get("add_prefix_space") is True
    return pairs | {f"{KEYS}.add_space_prefix": prefix}, []


def _name_of_cut(parts: Sequence[Mapping[str, Any]], whole: bool) -> str | None:
    """llama.cpp's name of a pre-tokenizer, or None. whole: `ignore_merges` is set."""
    if not parts or parts[-1].get("type") != "ByteLevel":
        return None
    kinds = [part.get("type") for part in parts[:-1]]
    expressions = tuple((part.get("pattern") or {}).get("Regex") for part in parts[:-1])
    cut = DIGITS if kinds == ["Digits"] and parts[0].get("individual_digits") else expressions
    if (cut in (GPT2, DIGITS)) != (parts[-1].get("use_regex", True) is True):
        return None
    return next((name for name, each in CUT.items() if each == cut and (name in STARTED) == whole), None)


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> NDArray[np.float32]:
    """Score of each piece: minus the rank of the first merge that forms it, from 1; 0 without such a merge."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges, 1):
        ranks.setdefault(pair.replace(" ", ""), rank)
    return np.array([-float(ranks.get(token, 0)) for token in tokens], np.float32)
