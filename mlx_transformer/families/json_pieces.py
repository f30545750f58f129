"""Vocabularies in JSON: byte-level BPE, and SentencePiece's pieces as transformers 5 saves them.

Byte-level BPE (BART, RoBERTa): vocab.json and merges.txt become a tokenizer.json. Text is split into words as in GPT-2,
by the component ByteLevel, and bytes are merged within a word.

SentencePiece (T5, mT5, UMT5, Pegasus, NLLB, mBART): transformers 5 writes only a tokenizer.json, which splits text
nearly as SentencePiece does. Our tokenizer.json (`text/sentencepiece_tokenizer.py`) is made from its pieces, scores and
replacement table, and splits text exactly so. mBART's has no table: all white space separates words, and no characters
are replaced."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_transformer.core.tokenizer_files import JOINT
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_object, read_text
from mlx_transformer.text.added_tokens import AddedToken, filler
from mlx_transformer.text.published_ids import ROLES
from mlx_transformer.text.sentencepiece import (
    BPE,
    BYTE,
    BYTES,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    Piece,
    SentencePiece,
    is_whole,
)
from mlx_transformer.text.sentencepiece_tokenizer import RUNS_OF_SPACES, tokenizer_json
from mlx_transformer.text.tokenizer import check_parts, read_backend

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def byte_level_json(vocabulary: Mapping[str, int], merges: str, roles: Mapping[str, Any], space: bool) -> str:
    """Make a tokenizer.json of byte-level BPE whose output is `<s> text </s>`.

    vocabulary: {token: id}. merges: the text of merges.txt. roles: stored under "mlx_transformer". space: put a space
    before each text. Raises `UserError` for a vocabulary without <s>, </s> or <unk>, and for damaged merges.
    """
    if missing := [token for token in ("<s>", "</s>", "<unk>") if token not in vocabulary]:
        raise UserError(f"the vocabulary has no {' and no '.join(missing)}")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ends = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("<s>", "</s>")]
    parts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": True}
    specification = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            # as in `transformers`, <mask> takes the space before it
            {"id": vocabulary[t], "content": t, **flags, "lstrip": t == "<mask>"}
            for t in SPECIAL
            if t in vocabulary
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [ends[0], parts[0], ends[1]],
            "pair": [ends[0], parts[0], ends[1], ends[1], parts[1], ends[1]],
            "special_tokens": {t: {"id": t, "ids": [vocabulary[t]], "tokens": [t]} for t in ("<s>", "</s>")},
            ROLES: dict(roles),
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocabulary.items(), key=lambda each: each[1])),
            "merges": _pairs(merges),
        },
    }
    return json.dumps(specification, ensure_ascii=False, indent=1) + "\n"


def _pairs(merges: str) -> list[list[str]]:
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    pairs = [line.split(" ") for line in lines]
    for line, pair in zip(lines, pairs, strict=True):
        if len(pair) != 2:
            raise UserError(f"merges.txt: {line!r:.60} is no pair of tokens")
    return pairs


def pieces_json(path: Path, pad: str, start: int, tokens: Sequence[AddedToken], control: Sequence[AddedToken]) -> str:
    """Make our tokenizer.json from a folder's, with the same ids.

    path: the folder. pad: spelling of the padding token. start: id of the decoder's start token. tokens: added by the
    maker. control: tokens of roles and languages, which are split like any text if somebody types them. Raises
    `UserError` for a damaged file, and for a tokenizer of another kind.
    """
    specification, where = read_object(path / JOINT), path / JOINT
    check_parts(specification, str(where))
    read_backend(lambda: read_text(where), str(where))
    scheme, splits = _metaspace(specification.get("pre_tokenizer"), where)
    charsmap, collapses, strips = _normalizer(specification.get("normalizer"), where)
    model = specification.get("model")
    scored, unknown, merges = _scored(model if isinstance(model, dict) else {}, where)
    fallback = isinstance(model, dict) and model.get("byte_fallback") is True
    alone = [token for token in tokens if token.id >= len(scored) or not scored[token.id][1]]  # score 0: no piece
    scored += _behind(len(scored), tokens, control)
    named = {token.content for token in (*control, *alone)} | {filler(id).content for id in range(len(scored))}
    pieces = [
        Piece(text, score, UNKNOWN if id == unknown else _type(text, named, fallback))
        for id, (text, score) in enumerate(scored)
    ]
    ids = {piece.text: id for id, piece in enumerate(pieces)}
    if len(ids) < len(pieces) or "" in ids:
        raise UserError(f"{where}: has a piece twice, or an empty one")
    made = SentencePiece(
        pieces=tuple(pieces),
        model_type=UNIGRAM if merges is None else BPE,
        byte_fallback=fallback,
        charsmap=charsmap,
        normalizer="nmt_nfkc" if charsmap else "identity",
        dummy_prefix=scheme != "never",
        remove_extra_whitespace=collapses or splits,
    )
    roles = {"pad": ids.get(pad, -1), "bos": start, "unk": unknown}
    spaces = ("words" if strips else "split") if splits else "ends" if strips else "kept"
    text = tokenizer_json(made, roles=roles, tokens=tokens, space_each=scheme != "first", spaces=spaces)
    ours = json.loads(text)
    if merges is not None:
        ours["model"]["merges"] = merges
    return json.dumps(ours, ensure_ascii=False, indent=1) + "\n"


def is_pieces(specification: Mapping[str, Any]) -> bool:
    """Whether a parsed tokenizer.json marks spaces as SentencePiece does, by the component Metaspace."""
    return any(
        part.get("type") == "Metaspace" for part in components(specification.get("pre_tokenizer"), "pretokenizers")
    )


def _behind(size: int, tokens: Sequence[AddedToken], control: Sequence[AddedToken]) -> list[tuple[str, float]]:
    """Spellings and scores of the ids from `size` to the last one in `control`."""
    texts = {token.id: token.content for token in (*tokens, *control)}
    last = max((token.id for token in control), default=-1)
    return [(texts.get(id, filler(id).content), 0.0) for id in range(size, last + 1)]


def _type(text: str, named: Collection[str], fallback: bool) -> int:
    if text in named:
        return CONTROL
    return BYTE if fallback and text in BYTES else NORMAL


def components(component: Any, inside: str) -> list[Mapping[str, Any]]:
    """The components of a Sequence, or a list of the single component; [] if there is none.

    inside: the key of a Sequence's list, e.g. "normalizers".
    """
    if not isinstance(component, dict):
        return []
    listed = component.get(inside) if component.get("type") == "Sequence" else [component]
    return [part for part in listed if isinstance(part, dict)] if isinstance(listed, list) else []


def _metaspace(component: Any, where: Path) -> tuple[str, bool]:
    """The pre-tokenizer's `prepend_scheme` (always, first or never), and whether all white space separates words."""
    kinds = [part.get("type") for part in components(component, "pretokenizers")]
    if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        raise UserError(f"{where}: pre_tokenizer is {kinds or None!r:.80}, not SentencePiece's Metaspace")
    mark = components(component, "pretokenizers")[-1]
    scheme = mark.get("prepend_scheme", "always" if mark.get("add_prefix_space", True) else "never")
    if mark.get("replacement") != "\u2581" or scheme not in ("always", "first", "never"):
        raise UserError(f"{where}: unsupported Metaspace {mark!s:.80}")
    return scheme, len(kinds) > 1


def _normalizer(component: Any, where: Path) -> tuple[bytes, bool, bool]:
    """The replacement table, whether a run of spaces becomes one space, and whether trailing spaces are removed."""
    charsmap, collapses, strips = b"", False, False
    for part in components(component, "normalizers"):
        kind = part.get("type")
        if kind == "Precompiled" and not charsmap and is_whole(part.get("precompiled_charsmap")):
            charsmap = base64.b64decode(part["precompiled_charsmap"])
        elif kind == "Replace" and part.get("pattern") == {"Regex": RUNS_OF_SPACES}:
            collapses = True
        elif kind == "Strip":
            strips = part.get("strip_right") is True
        else:
            raise UserError(f"{where}: normalizer {kind!r:.40} is not supported for SentencePiece vocabularies")
    return charsmap, collapses, strips


def _scored(model: Mapping[str, Any], where: Path) -> tuple[list[tuple[str, float]], int, list[Any] | None]:
    """Pieces with scores in the order of ids, the id of <unk>, and for BPE the merges. A BPE piece's score is minus the
    rank of its first merge."""
    vocabulary, kind = model.get("vocab"), model.get("type", "Unigram" if "unk_id" in model else "BPE")
    try:
        if kind == "Unigram" and isinstance(vocabulary, list):
            scored = [(str(text), float(score)) for text, score in vocabulary]
            unknown = model.get("unk_id")
            if type(unknown) is int and 0 <= unknown < len(scored):
                return scored, unknown, None
        if kind == "BPE" and isinstance(vocabulary, dict) and isinstance(merges := model.get("merges"), list):
            pairs = [pair.split(" ") if isinstance(pair, str) else [str(part) for part in pair] for pair in merges]
            ranks: dict[str, int] = {}
            for rank, (left, right) in enumerate(pairs):
                ranks.setdefault(left + right, rank)
            texts = sorted(vocabulary, key=vocabulary.__getitem__)
            if sorted(vocabulary.values()) == list(range(len(texts))):
                return [(t, -float(ranks.get(t, 0))) for t in texts], vocabulary[model.get("unk_token")], pairs
    except (TypeError, ValueError, KeyError):
        pass
    raise UserError(
        f"{where}: its model must be Unigram with scores or BPE with merges, with <unk> and no gaps in its ids"
    )
