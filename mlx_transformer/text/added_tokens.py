"""Tokens that a model's maker added to its vocabulary, such as "[E1]", "{NAME}" or "<extra_id_0>".

An added token is a single id wherever it stands in a text. Decoded text has it too, unless it is special. Tokens with
a role (padding, start, end, unknown, a language) are split like any text if somebody types them: a text must not steer
the model.

So our tokenizer.json has `special: false` for added tokens and `special: true` for roles, and is read with
`encode_special_tokens` (in transformers `split_special_tokens`). The ids of added tokens that their maker called
special are stored beside the roles (`published_ids.ROLES`), under "silent".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

ROLES = "mlx_transformer"
SYNTAX, ESCAPED = re.compile(r"[][^$.*+?(){}|/\\]"), r"\\\g<0>"
"""Characters with a meaning in regular expressions of Rust or JavaScript, and the replacement that escapes them."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
WORDS_FIRST = {"type": "WhitespaceSplit"}
SILENT, WHOLE, CUT, NORMALIZED = "silent", "whole", "cut", "normalized"
"""Keys beside the roles, each with a list of ids of added tokens; the last three for SentencePiece vocabularies.

silent       left out of decoded text
whole        looked for before text is split into pieces
cut          of `whole`: also pieces, which text may be split into
normalized   of `whole`: called normalised by their maker, but looked for in text as it was typed
"""


class AddedToken(NamedTuple):
    """A token, and how it is found in a text."""

    id: int
    content: str
    special: bool = False
    """Left out of decoded text."""
    normalized: bool = False
    """Looked for in the normalised text, else in the text as it was typed."""
    lstrip: bool = False
    """Takes the white space before it."""
    rstrip: bool = False
    """Takes the white space behind it."""
    single_word: bool = False
    """Found only where no letter, digit or "_" is beside it."""

    @classmethod
    def read(cls, entry: Any, id: Any) -> AddedToken | None:
        """Read an entry of tokenizer.json or tokenizer_config.json; None if it is no token."""
        if not isinstance(entry, Mapping) or not isinstance(content := entry.get("content"), str) or not content:
            return None
        if type(id) is not int or id < 0:
            return None
        return cls(id, content, **{flag: entry.get(flag) is True for flag in FLAGS})

    def entry(self, special: bool) -> dict[str, Any]:
        """The token's entry in a tokenizer.json."""
        return {"id": self.id, "content": self.content} | {
            flag: getattr(self, flag) if flag != "special" else special for flag in FLAGS
        }


def added_tokens(specification: Mapping[str, Any]) -> list[AddedToken]:
    """The added tokens of a parsed tokenizer.json, sorted by id. Damaged entries are skipped."""
    listed = specification.get("added_tokens")
    entries = listed if isinstance(listed, list) else []
    tokens = [AddedToken.read(entry, entry.get("id")) for entry in entries if isinstance(entry, Mapping)]
    return sorted(token for token in tokens if token is not None)


def filler(id: int) -> AddedToken:
    """The placeholder "<unused ID>" for an id without a token; it is special, so that no text contains it."""
    return AddedToken(id, f"<unused {id}>", special=True)


def mark_of(specification: Mapping[str, Any]) -> Mapping[str, Any]:
    """The Metaspace component of a parsed tokenizer.json: its pre-tokenizer, or the second part of that after
    WhitespaceSplit. {} if there is none."""
    before = specification.get("pre_tokenizer")
    if isinstance(before, dict) and before.get("type") == "Sequence":
        parts = before.get("pretokenizers")
        before = parts[1] if isinstance(parts, list) and len(parts) == 2 and parts[0] == WORDS_FIRST else None
    return before if isinstance(before, dict) and before.get("type") == "Metaspace" else {}


def silent_pattern(contents: Iterable[str]) -> str:
    """A regular expression that matches exactly these tokens.

    >>> silent_pattern(["<a>", "<b>"])
    '^(?:<a>|<b>)$'
    """
    return f"^(?:{'|'.join(SYNTAX.sub(ESCAPED, content) for content in contents)})$"


def silent_contents(specification: Mapping[str, Any]) -> list[str]:
    """The spellings of the tokens in "silent" in a parsed tokenizer.json of ours."""
    template = specification.get("post_processor")
    roles = template.get(ROLES) if isinstance(template, Mapping) else None
    silent = roles.get(SILENT) if isinstance(roles, Mapping) else None
    ids = silent if isinstance(silent, list) else []
    return [token.content for token in added_tokens(specification) if token.id in ids]


def silencing(decoder: Mapping[str, Any], contents: Sequence[str]) -> dict[str, Any]:
    """Put a step before a decoder that drops tokens: other programs drop only tokens with `special: true`.

    The first remaining token then loses its leading space.
    """
    parts = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    if parts[-1]["type"] == "Metaspace":
        space = {"type": "Replace", "pattern": {"String": parts[-1]["replacement"]}, "content": " "}
        first = [{"type": "Fuse"}, {"type": "Strip", "content": parts[-1]["replacement"], "start": 1, "stop": 0}]
        parts = [*parts[:-1], *(first if parts[-1]["prepend_scheme"] != "never" else []), space]
    silencer = {"type": "Replace", "pattern": {"Regex": silent_pattern(contents)}, "content": ""}
    return {"type": "Sequence", "decoders": [silencer, *parts]}


def without_silencing(specification: Mapping[str, Any]) -> Any:
    """The decoder of a parsed tokenizer.json with `silencing` undone."""
    decoder, contents = specification.get("decoder"), silent_contents(specification)
    parts = decoder.get("decoders") if isinstance(decoder, Mapping) else None
    if not contents or not isinstance(parts, list) or len(parts) < 2 or not isinstance(parts[0], Mapping):
        return decoder
    if parts[0].get("pattern") != {"Regex": silent_pattern(contents)}:
        return decoder
    kept = parts[1:]
    if before := mark_of(specification):
        space = {"String": before.get("replacement")}
        end = next((i for i, x in enumerate(kept) if x.get("type") == "Fuse" or x.get("pattern") == space), len(kept))
        kept = [*kept[:end], before]
    return kept[0] if len(kept) == 1 else {"type": "Sequence", "decoders": kept}


class Part(NamedTuple):
    """A part of a text: an added token, or the text between two of them, whose id is None."""

    id: int | None
    start: int
    end: int
    text: str


class Splitter:
    """Finds added tokens in a text, with the library `tokenizers`."""

    def __init__(self, tokens: Sequence[AddedToken], content: Callable[[str], str] = str) -> None:
        """content: maps a token to its spelling in the texts, e.g. the normalised spelling for normalised texts."""
        self.tokens = tokens
        spelled = {content(token.content): token for token in reversed(tokens)}
        spelled.pop("", None)
        self._ids = [None, *(token.id for token in spelled.values())]
        self._maybe = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        self._backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"\0text": 0}, unk_token="\0text"))
        self._backend.add_tokens(
            [
                tokenizers.AddedToken(
                    text, single_word=t.single_word, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False
                )
                for text, t in spelled.items()
            ]
        )

    def may_split(self, text: str) -> bool:
        """Whether the text contains the spelling of a token."""
        return self._maybe.search(text) is not None

    def parts(self, text: str) -> Iterable[Part]:
        """Split a text into parts that cover it from its first character to its last."""
        if not text or not self.may_split(text):
            return [Part(None, 0, len(text), text)] if text else []
        encoding = self._backend.encode(text)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return [Part(self._ids[id], start, end, text[start:end]) for id, (start, end) in places]


class PythonSplitter(Splitter):
    """Finds added tokens as the Python tokenizers of transformers do (`tokenize`).

    All are looked for in the text as it was typed. A token of `single_word` without a space beside it is joined with
    the neighbouring text.
    """

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self.tokens, self._by_content = tokens, {token.content: token for token in tokens}
        longest_first = sorted(self._by_content, key=len, reverse=True)
        self._maybe = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def parts(self, text: str) -> Iterable[Part]:
        borders = sorted({0, len(text), *(at for found in self._maybe.finditer(text) for at in found.span())})
        texts = [text[start:end] for start, end in itertools.pairwise(borders)]
        for i, part in enumerate(texts):
            if (token := self._by_content.get(part)) is None:
                continue
            left, right = texts[i - 1] if i else "", texts[i + 1] if i + 1 < len(texts) else ""
            if token.rstrip and right:
                texts[i + 1] = right.lstrip()
            if token.lstrip and left:
                texts[i - 1] = left.rstrip()
            if token.single_word and left and left[-1] != " ":
                texts[i - 1], texts[i] = texts[i - 1] + part, ""
            elif token.single_word and right and right[0] != " ":
                texts[i + 1], texts[i] = part + texts[i + 1], ""
        for part, (start, end) in zip(texts, itertools.pairwise(borders), strict=True):
            if part:
                token = self._by_content.get(part)
                yield Part(None if token is None else token.id, start, end, part)
