"""Lines that tell tokenizers apart: names in 30 languages and 20 scripts, loose marks, odd spaces."""

from __future__ import annotations

import unicodedata
from functools import cache
from random import Random

from babel import Locale

LANGUAGES = "en de fr vi pl el ru ar he hi bn ta te kn ml th ka hy ko ja zh am km my si gu pa fa lo mn".split()
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\u3000", "\xa0", "\u200b", "\u2028", "\x85", "a", "b", "."]


@cache
def names(languages: int = 150, territories: int = 100) -> list[str]:
    """What each language calls other languages and territories."""
    lines = []
    for code in LANGUAGES:
        locale = Locale.parse(code)
        lines += [*list(locale.languages.values())[:languages], *list(locale.territories.values())[:territories]]
    return lines


def code_points(together: int = 24) -> list[str]:
    """Every code point that any normaliser changes, between two letters and alone, several in a line. The others are
    ideographs, and what has no character."""
    codes = [*range(0x20000), *range(0x2F800, 0x2FA20), *range(0xE0000, 0xE0200)]
    points = [chr(c) for c in codes if not 0xD800 <= c < 0xE000]
    return [" ".join(f"a{c}b {c}" for c in points[i : i + together]) for i in range(0, len(points), together)]


@cache
def hard_lines(seed: int = 0, count: int = 400) -> dict[str, list[str]]:
    """{kind: lines}"""
    random = Random(seed)
    marks = [chr(c) for c in range(0x20000) if unicodedata.combining(chr(c))]
    latin = [chr(c) for c in range(0x300, 0x346)]
    given = names()

    def drawn(letters: list[str], length: int = 12) -> list[str]:
        return ["".join(random.choice(letters) for _ in range(length)) for _ in range(count)]

    def marked(choices: list[str]) -> list[str]:
        clusters = [
            random.choice("aeouncsk") + "".join(random.sample(choices, random.randint(1, 3))) for _ in range(99)
        ]
        return drawn(clusters, 6)

    return {
        "names": given,
        "taken apart": [unicodedata.normalize("NFD", line) for line in given],
        "taken apart, compatibility": [unicodedata.normalize("NFKD", line) for line in given],
        "marks of Latin": marked(latin),
        "marks of all scripts": marked(marks),
        "kana of half width": drawn([chr(c) for c in range(0xFF61, 0xFFA0)]),
        "parts of Hangul": drawn([chr(c) for c in range(0x1100, 0x1200)]),
        "spaces": drawn(SPACES),
        "anything": drawn([chr(c) for c in range(0x30000) if not 0xD800 <= c < 0xE000]),
        "repeated": drawn(["a", "b", "ab", "aa"]),
        "control pieces": ["a </s> b", "</s>", "x<unk></s>y", "<pad>", "a<s>"],
        "nothing": ["", " ", "\u3000\t"],
    }
