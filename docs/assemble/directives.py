"""What a comment in a page stands for, each alone in its line; on GitHub, where pages are read as they are, nothing.

<!-- twins attention.py attention_weights -->     the definitions in mlx_transformer/nn and export/nn, side by side
<!-- excerpt mlx_transformer/training/optimizers.py noam -->     one definition
<!-- figure 15 -->                                 the figure of this row of the claims, if figures were made
<!-- picture network -->                           a picture drawn from the code
<!-- walk #layer=1&at=heads Follow a word -->      a link to the walk through the models that ship, a page of the site:
                                                  where it looks first, if it is named, and the station it shows
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from urllib.parse import parse_qs

from export.explain.page import words as stations

from . import import_picture, network_picture
from .captions import beside
from .markdown import lines_of
from .problem import Problem
from .symbols import definition

DIRECTIVE = re.compile(r"^<!-- (\w+) (.+?) -->$")
PICTURES: dict[str, Callable[[Path], str]] = {"network": network_picture.draw, "imports": import_picture.draw}
SourceLink = Callable[[str, str, str], str]
"""(file, symbol, label) -> HTML of the link."""


def expand(
    text: str, root: Path, figures: dict[int, str], link: SourceLink, walk: str = "", strict: bool = True
) -> str:
    """`figures`: row of the claims -> picture, and `walk`: the walk, relative to the page. `strict`: a comment that is
    none of these is an error; elsewhere it may be somebody else's."""
    lines = []
    for line, fenced in lines_of(text):
        match = None if fenced else DIRECTIVE.match(line)
        made = None if match is None else _made(match[1], match[2].split(), root, figures, link, walk)
        if match is not None and made is None and strict:
            raise Problem(f"{line}: no such directive")
        lines.append(line if made is None else made)
    return "\n".join(lines)


def figures_wanted(text: str) -> set[int]:
    """Rows of the claims whose figures a page shows."""
    found = (DIRECTIVE.match(line) for line, fenced in lines_of(text) if not fenced)
    return {int(match[2].split()[0]) for match in found if match and _is_figure(match[1], match[2].split())}


def _is_figure(name: str, words: list[str]) -> bool:
    return name == "figure" and len(words) > 1 and words[0].isdecimal()


def _made(name: str, words: list[str], root: Path, figures: dict[int, str], link: SourceLink, walk: str) -> str | None:
    if name == "twins" and len(words) == 2:
        file, symbol = words
        sides = [_excerpt(root, f"{side}/nn/{file}", symbol, link) for side in ("mlx_transformer", "export")]
        return '<div class="twins" markdown>\n\n' + "\n\n".join(sides) + "\n\n</div>\n"
    if name == "excerpt" and len(words) == 2:
        return _excerpt(root, words[0], words[1], link)
    if _is_figure(name, words):
        picture = figures.get(int(words[0]))
        return f"\n{beside(picture, ' '.join(words[1:]))}\n" if picture else ""
    if name == "walk":
        return _walk(walk, words)
    if name == "picture" and words[0] in PICTURES:
        return PICTURES[words[0]](root)
    return None


def _walk(walk: str, words: list[str]) -> str:
    place = words[0] if words[0].startswith("#") else ""
    for station in parse_qs(place.removeprefix("#")).get("at", []):
        if station not in stations()["stations"]:
            raise Problem(f"<!-- walk {' '.join(words)} -->: the walk has no station {station}")
    return f'\n<a href="{walk}{escape(place)}">{" ".join(words[place != "" :])}</a>\n'


def _excerpt(root: Path, file: str, symbol: str, link: SourceLink) -> str:
    code = definition(root / file, symbol).code
    head = link(file, symbol, f"`{file}: {symbol}`")
    return f'<div class="excerpt" markdown>\n\n{head}\n\n````` python\n{code}\n`````\n\n</div>\n'
