"""A text as the lines that a model translates, and what stays around them: ends of lines, or the tags of HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from itertools import chain

# Comments, scripts and styles whole; tags with their attributes. Each character is looked at a few times at most.
MARKUP = re.compile(
    r"""(<!--.*?(?:-->|\Z)|<(?:script|style)\b.*?(?:</(?:script|style)\s*>|\Z)|<[!?/]?[a-z](?:[^<>"']|"[^"]*"|'[^']*')*>)""",
    re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True)
class Frame:
    """around: what stands before each line, and behind the last. html: a line is written as HTML has it."""

    lines: list[str]
    around: list[str]
    html: bool = False

    @classmethod
    def of_text(cls, text: str) -> Frame:
        """Return each line of a text by itself."""
        lines = text.split("\n")
        return cls(lines, ["", *["\n"] * (len(lines) - 1), ""])

    @classmethod
    def of_html(cls, text: str) -> Frame:
        """Return what stands between two tags by itself, unless there is no letter and no digit in it."""
        lines: list[str] = []
        around: list[list[str]] = [[]]
        for place, piece in enumerate(MARKUP.split(text)):
            words = "" if place % 2 else unescape(piece)
            if not any(map(str.isalnum, words)):
                around[-1].append(piece)
                continue
            core = piece.strip()
            before, _, after = piece.partition(core)
            around[-1].append(before)
            lines.append(" ".join(words.split()))
            around.append([after])
        return cls(lines, list(map("".join, around)), html=True)

    def filled(self, lines: Sequence[str]) -> str:
        """Put others in the places of the lines."""
        written = [escape(line, quote=False) for line in lines] if self.html else lines
        return "".join(chain.from_iterable(zip(self.around, [*written, ""], strict=True)))
