"""A Markdown file as the documentation needs it: its headings, its parts, its links. What is fenced is left alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
"""Of a link to a file here: whether it is a picture, its label, the file, the heading or symbol in it."""
HEADING = re.compile(r"^(#{1,6}) (.+)$")
FENCE = re.compile(r"^(`{3,})")


@dataclass(frozen=True)
class Part:
    """A heading of level 1 or 2 and what follows it, up to the next."""

    slug: str
    title: str
    lines: list[str]
    slugs: frozenset[str]
    """Of all headings in it, its own included."""


def parts(text: str) -> list[Part]:
    """Of a whole file, in order."""
    found: list[tuple[str, list[str], set[str]]] = []
    for line, fenced in lines_of(text):
        match = None if fenced else HEADING.match(line)
        if match and len(match[1]) <= 2:
            found.append((match[2], [], set()))
        if not found:
            found.append(("", [], set()))
        found[-1][1].append(line)
        if match:
            found[-1][2].add(slug(match[2]))
    return [Part(slug(title), title, lines, frozenset(slugs)) for title, lines, slugs in found]


def slug(title: str) -> str:
    """The fragment by which a heading is linked, as GitHub makes it."""
    return re.sub(r"[^\w\s-]", "", title.strip().lower()).replace(" ", "-")


def lines_of(text: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it belongs to a fenced block."""
    fence = ""
    for line in text.splitlines():
        match = FENCE.match(line)
        if not fence and match:
            fence = match[1]
            yield line, True
        elif fence:
            yield line, True
            fence = "" if line.strip() == fence else fence
        else:
            yield line, False


def replace_formulas(text: str, written: Callable[[str], str]) -> str:
    """The same text with each indented line written anew; formulas in a line are four spaces apart or more."""
    lines = []
    for line, fenced in lines_of(text):
        formulas = re.split(r" {4,}", line[4:]) if line.startswith("    ") and not fenced else []
        lines.append(f'<div class="formula" tabindex="0">{"".join(map(written, formulas))}</div>' if formulas else line)
    return "\n".join(lines)


def replace_links(text: str, replaced: Callable[[re.Match[str]], str]) -> str:
    """The same text with each link that is not in code written anew. A link may go on in the next line."""
    chunks: list[tuple[list[str], bool]] = []
    for line, fenced in lines_of(text):
        if not chunks or chunks[-1][1] != fenced:
            chunks.append(([], fenced))
        chunks[-1][0].append(line)
    return "\n".join("\n".join(c) if fenced else LINK.sub(replaced, "\n".join(c)) for c, fenced in chunks)
