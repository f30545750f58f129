"""HTML to translate: sentences without their tags, and the tags put back into the translations.

    <p>Hello <b>big</b> world</p>  ->  line "Hello big world", and an element b around word 1

A line ends where a block element begins or ends (`<p>`, `<li>`, `<br>`, ...). Inline elements stay in their line: their
places in the translation follow the alignment of words, or the proportion of words without an alignment. Protected
content (`<code>`, `translate="no"`, class `notranslate`, comments, scripts) and all tags are kept byte for byte.

Tags are read by a regular expression and followed with a stack, since Python's `html.parser` has four problems:

- it follows no elements, so the stack would be needed anyway, and it doesn't give end tags back as they were written;
- its time is quadratic: 23 s for 40 KB of `<a ` in Python 3.11.7, here 0.04 s;
- `<![` raises `AssertionError`;
- comments and `textarea` are read differently by different versions of Python.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from itertools import accumulate

from mlx_transformer.generation.translate import Translation

# Whole comments, and elements whose content is no markup; tags with their attributes. Linear in the text.
MARKUP = re.compile(
    r"""(<!--.*?(?:-->|\Z)|<(?P<raw>script|style|textarea)\b.*?(?:</(?P=raw)\s*>|\Z)"""
    r"""|<[!?/]?[a-z](?:[^<>"']|"[^"]*"|'[^']*')*>)""",
    re.DOTALL | re.IGNORECASE,
)
NO_TAG = re.compile("<(?=[a-z/!?])", re.IGNORECASE)
"""The beginning of an incomplete tag."""
NAME = re.compile(r"</?([a-z][^\s/>]*)", re.IGNORECASE)
ATTRIBUTE = re.compile(r"""\s([^\s=>"'/]++)\s*+=\s*+("[^"]*"|'[^']*'|[^\s>]++)""")
VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
BLOCK = frozenset(
    "address article aside audio base blockquote body br button canvas caption center col colgroup dd details dialog"
    " dir div dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html"
    " iframe legend li link main menu meta nav noscript object ol optgroup option p pre section select summary table"
    " tbody td template tfoot th thead title tr ul video".split()
)
OPTIONAL_END = frozenset(
    "body caption colgroup dd dt head html li optgroup option p tbody td tfoot th thead tr".split()
)
"""Elements that are valid without an end tag."""
DEEPEST = 100
"""Inline elements nested deeper than this end lines, as block elements do."""
PROTECTED = frozenset("code kbd math pre samp svg var".split())


@dataclass
class Token:
    """A part of the text. kind: "text"; "break", which ends a line; "open" or "close" of an inline element; or "atom",
    which stays in its line unchanged."""

    kind: str
    text: str


@dataclass
class Element:
    """An inline element, or an atom (no words, no `close`), in a line of source words."""

    open: str
    first: int
    """The first word inside."""
    last: int = 0
    """One past the last word inside."""
    close: str = ""
    inside: list[Element] = field(default_factory=list)
    spaced: tuple[bool, bool] = (False, False)
    """Whether there is white space before the element, and after its start tag."""


@dataclass(frozen=True)
class Frame:
    """A text, split into lines to translate and the strings `around` them: before each line, and after the last.
    elements: of each line of HTML; None for plain text."""

    lines: list[str]
    around: list[str]
    elements: list[list[Element]] | None = None

    @classmethod
    def of_text(cls, text: str) -> Frame:
        """Split a text at its line ends."""
        lines = text.split("\n")
        return cls(lines, ["", *["\n"] * (len(lines) - 1), ""])

    @classmethod
    def of_html(cls, text: str) -> Frame:
        """Split HTML into sentences; those without a letter or digit stay as they are."""
        frame, run, gap = cls([], [], []), list[Token](), list[str]()
        for token in (*_tokens(text), Token("break", "")):
            if token.kind == "break":
                frame._add(run, gap)
                gap.append(token.text)
                run = []
            else:
                run.append(token)
        frame.around.append("".join(gap))
        return frame

    def _add(self, run: list[Token], gap: list[str]) -> None:
        """Add the text between two block elements as a line. gap: the strings after the last line, then after this."""
        texts = [unescape(token.text) if token.kind == "text" else "" for token in run]
        text = "".join(texts)
        if not any(map(str.isalnum, text)):
            gap += [token.text for token in run]
            return
        assert self.elements is not None
        words = list(re.finditer(r"\S+", text))
        ends = list(accumulate(map(len, texts)))
        tags = [end for token, end in zip(run, ends, strict=True) if token.kind != "text"]
        self.around.append("".join([*gap, text[: min([words[0].start(), *tags])]]))
        gap[:] = [text[max([words[-1].end(), *tags]) :]]
        self.lines.append(" ".join(word.group() for word in words))
        self.elements.append(_elements(run, ends, text, words))

    @property
    def has_elements(self) -> bool:
        return any(self.elements or ())

    def filled(self, translations: Sequence[Translation]) -> str:
        """Put translations in the places of the lines."""
        pieces = [self.around[0]]
        for i, translation in enumerate(translations):
            if self.elements is None:
                pieces.append(translation.text)
            else:
                pieces += _Placing(self.lines[i], translation).written(self.elements[i])
            pieces.append(self.around[i + 1])
        return "".join(pieces)


def _tokens(text: str) -> Iterator[Token]:
    """Read HTML as tokens. Missing end tags are added, and a start tag is added before a stray end tag."""
    reader = _Reader()
    for place, piece in enumerate(MARKUP.split(text)):
        kind = place % 3  # text, markup, the group `raw`
        if kind == 0 and piece:
            reader.add("text", NO_TAG.sub("&lt;", piece))
        elif kind == 1 and piece[:2] in ("<!", "<?"):
            is_comment = piece.startswith("<!--")
            end = "-->" if is_comment and not piece.endswith("-->") else ""  # an open comment would hide later tags
            reader.add("atom" if is_comment else "break", piece + end)
        elif kind == 1:
            reader.tag(piece)
    reader.close_down_to(0)
    return iter(reader.tokens)


@dataclass
class _Open:
    name: str
    at: int
    """The index of its token."""
    protected: bool
    ends_lines: bool
    breaks: int
    """Number of line-ending tokens before it."""


class _Reader:
    """Follows the elements of a page, and writes its tokens."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.stack: list[_Open] = []
        self.levels: list[Counter[str]] = [Counter()]
        """For each open block, the inline elements opened since, counted by name."""
        self.blocks: Counter[str] = Counter()
        self.breaks = self.protecting = 0

    def add(self, kind: str, text: str) -> None:
        self.tokens.append(Token(kind, text))
        self.breaks += kind == "break"

    def tag(self, piece: str) -> None:
        match = NAME.match(piece)
        name = match[1].lower() if match else ""
        if name in ("script", "style", "textarea"):  # with its content, or a stray end tag
            ends = re.search(rf"</{name}\s*>\Z", piece, re.IGNORECASE)
            start = f"<{name}>" if piece.startswith("</") else ""
            self.add("atom", start + piece + ("" if ends else f"</{name}>"))
        elif piece.startswith("</"):
            self._end(name, piece)
        elif name in VOID:
            self.add("break" if name in BLOCK else "atom", piece)
        else:
            protected = name in PROTECTED or _is_protected(piece)
            ends_lines = name in BLOCK or len(self.stack) > DEEPEST
            self.stack.append(_Open(name, len(self.tokens), protected, ends_lines, self.breaks))
            self.protecting += protected
            if name in BLOCK:
                self.blocks[name] += 1
                self.levels.append(Counter())
            else:
                self.levels[-1][name] += 1
            self.add("break" if ends_lines else "open", piece)

    def _end(self, name: str, piece: str) -> None:
        is_block = name in BLOCK
        if not (self.blocks if is_block else self.levels[-1])[name]:
            self.add("break" if is_block else "atom", piece if name in VOID else f"<{name}>{piece}")
            return
        while self.stack[-1].name != name:
            self._close("" if self.stack[-1].name in OPTIONAL_END else f"</{self.stack[-1].name}>")
        self._close(piece)

    def close_down_to(self, size: int) -> None:
        while len(self.stack) > size:
            self._close("" if self.stack[-1].name in OPTIONAL_END else f"</{self.stack[-1].name}>")

    def _close(self, piece: str) -> None:
        """Close the innermost element. A protected element becomes a single token; an inline element around a block
        ends lines."""
        last = self.stack.pop()
        if last.name in BLOCK:
            self.levels.pop()
            self.blocks[last.name] -= 1
        else:
            self.levels[-1][last.name] -= 1
        self.add("break" if last.ends_lines else "close", piece)
        self.protecting -= last.protected
        ends_lines = self.breaks > last.breaks
        if last.protected and not self.protecting:
            text = "".join(token.text for token in self.tokens[last.at :])
            del self.tokens[last.at :]
            self.breaks = last.breaks
            self.add("break" if ends_lines else "atom", text)
        elif ends_lines and not last.ends_lines:
            self.tokens[last.at].kind = self.tokens[-1].kind = "break"
            self.breaks += 2


def _is_protected(tag: str) -> bool:
    """Whether a start tag forbids the translation of its element."""
    for name, value in ATTRIBUTE.findall(tag):
        value = value.strip("\"'").lower()
        if (name.lower(), value) == ("translate", "no") or (name.lower() == "class" and "notranslate" in value.split()):
            return True
    return False


def _elements(run: list[Token], ends: list[int], text: str, words: list[re.Match[str]]) -> list[Element]:
    """The elements of a line. text: the joined text of its tokens; ends: the end of each token's text in it."""
    begins, stops = [word.start() for word in words], [word.end() for word in words]
    outside = Element("", 0)
    nested = [outside]
    for token, at in zip(run, ends, strict=True):
        if token.kind == "text":
            continue
        if token.kind == "close":
            closed = nested.pop()
            closed.close, closed.last = token.text, max(closed.first, bisect_left(begins, at))
            continue
        first = bisect_right(stops, at) if token.kind == "open" else bisect_left(begins, at)
        element = Element(token.text, first, first, spaced=(text[at - 1 : at].isspace(), text[at : at + 1].isspace()))
        nested[-1].inside.append(element)
        if token.kind == "open":
            nested.append(element)
    return outside.inside


class _Placing:
    """Places the elements of a line in its translation."""

    def __init__(self, line: str, translation: Translation):
        self.words = [word.span() for word in re.finditer(r"\S+", translation.text)]
        self.text = translation.text
        self.source, self.target = len(line.split()), len(self.words)
        self.linked: dict[int, list[int]] = {}
        alignment = translation.alignment
        if alignment and (alignment.source_words, alignment.target_words) == (self.source, self.target):
            for source, target in alignment.links:
                self.linked.setdefault(source, []).append(target)
        self.out: list[str] = []
        self.at = 0  # characters of the text written so far

    def written(self, elements: list[Element]) -> list[str]:
        self._write(elements, 0, self.source, 0, self.target)
        self._text_to(len(self.text))
        return self.out

    def _write(self, elements: list[Element], first: int, last: int, low: int, high: int) -> None:
        """Write the elements of source words first to last among target words low to high, with the text before
        them."""
        places = []
        for order, element in enumerate(elements):
            all_words = (element.first, element.last) == (first, last) and first < last
            begin, end = (low, high) if all_words else self._place(element)
            places.append((min(max(begin, low), high), order, min(max(end, low), high), element))
        done = low
        for begin, _, end, element in sorted(places, key=lambda place: place[:2]):
            begin = max(begin, done)
            done = max(begin, end)
            if begin < done:
                self._text_to(self.words[begin][0])
            else:
                self._text_to(self.words[begin - 1][1] if begin else 0)
                if element.spaced[0] and self.out and not self.out[-1][-1:].isspace():
                    self.out.append(" ")
            self.out.append(element.open)
            self._write(element.inside, element.first, element.last, begin, done)
            if begin < done:
                self._text_to(self.words[done - 1][1])
            self.out.append(element.close)
            if done == 0 and element.spaced[1]:  # no earlier word brings a space
                self.out.append(" ")

    def _place(self, element: Element) -> tuple[int, int]:
        """The target words for an element: those aligned with its words, otherwise its share of the sentence."""
        linked = [target for word in range(element.first, element.last) for target in self.linked.get(word, ())]
        if linked:
            return min(linked), max(linked) + 1
        if self.linked and element.first and (before := self.linked.get(element.first - 1)):
            return max(before) + 1, max(before) + 1
        share = self.target / max(1, self.source)
        return round(element.first * share), round(element.last * share)

    def _text_to(self, end: int) -> None:
        if end > self.at:
            self.out.append(escape(self.text[self.at : end], quote=False))
            self.at = end
