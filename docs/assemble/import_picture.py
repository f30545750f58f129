"""Which folder of the code imports which, drawn from the import statements of every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from .pages import PACKAGES
from .svg import Svg

WIDTH, HEIGHT, ROW, MARGIN = 138, 40, 86, 14

Group = tuple[str, ...]
"""Folders that import each other, mostly one alone."""


def draw(root: Path) -> str:
    arrows = reduced(grouped(imports(root)))
    rows = list(reversed(layers(arrows)))
    level = {group: index for index, row in enumerate(rows) for group in row}
    ways: list[list[Group]] = []
    for group, others in arrows.items():
        for other in sorted(others):
            # A long arrow has a place in each row that it crosses, so that it goes between the boxes.
            passed: list[Group] = [("", *group, *other, str(row)) for row in range(level[group] + 1, level[other])]
            for row, place in enumerate(passed, level[group] + 1):
                rows[row].append(place)
            ways.append([group, *passed, other])
    untangle(rows, ways)
    svg = Svg(max(_width(row) for row in rows), "Which folder imports which")
    places = {}
    for index, row in enumerate(rows):
        x, gap = 0.0, (svg.width - sum(map(_extent, row))) / (len(row) + 1)
        for place in row:
            x += gap
            places[place] = (x + _extent(place) / 2, 10.0 + index * ROW)
            x += _extent(place)
    for way in ways:
        _arrow(svg, [places[place] for place in way])
    for group in arrows:
        x, y = places[group]
        names = ", ".join(folder.partition("/")[2] for folder in group)
        svg.box(x - WIDTH / 2, y, WIDTH, HEIGHT, names, group[0].partition("/")[0])
    return svg.figure(
        10 + len(rows) * ROW - (ROW - HEIGHT) + 10,
        "An arrow leads from a folder to one that it imports as it is loaded. Where a longer way leads there too, the "
        "short arrow is left out; folders in one box import each other, their modules don't.",
    )


def untangle(rows: list[list[Group]], ways: list[list[Group]]) -> None:
    """Sort each row by the mean place of its neighbours above and below, so that few arrows cross (Sugiyama 1981)."""
    neighbours: dict[Group, list[Group]] = {}
    for way in ways:
        for one, other in pairwise(way):
            neighbours.setdefault(one, []).append(other)
            neighbours.setdefault(other, []).append(one)
    for row in rows:
        row.sort()
    for _ in range(12):
        for chosen in (rows, rows[::-1]):
            share = {place: (i + 0.5) / len(row) for row in rows for i, place in enumerate(row)}
            for row in chosen:
                row.sort(key=lambda place: fmean([share[other] for other in neighbours.get(place, [place])]))
                share |= {place: (i + 0.5) / len(row) for i, place in enumerate(row)}


def _extent(place: Group) -> float:
    return WIDTH if place[0] else MARGIN


def _width(row: list[Group]) -> float:
    return sum(_extent(place) + MARGIN for place in row) + MARGIN


def _arrow(svg: Svg, points: list[tuple[float, float]]) -> None:
    (x, y), *others = points
    way, y = f"M{x:g} {y + HEIGHT:g}", y + HEIGHT
    for index, (to_x, to_y) in enumerate(others):
        end = to_y - 3 if index == len(others) - 1 else to_y
        way += f" C{x:g} {y + 28:g} {to_x:g} {end - 28:g} {to_x:g} {end:g}"
        x, y = to_x, end
        if index < len(others) - 1:
            way, y = way + f" v{HEIGHT}", y + HEIGHT
    svg.path(way, "arrow")


@cache
def imports(root: Path) -> dict[str, set[str]]:
    """Folder -> folders that its modules import as they are loaded."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for file in sorted((root / package).glob("*/**/*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            here = "/".join(parts[:2])
            targets = found.setdefault(here, set())
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                targets |= {"/".join(target.split(".")[:2]) for target in _targets(node, parts)} - {here}
    return {folder: targets & found.keys() for folder, targets in found.items()}


def grouped(graph: dict[str, set[str]]) -> dict[Group, set[Group]]:
    """Folders that reach each other taken as one."""

    def reached(folder: str, seen: set[str]) -> set[str]:
        for other in graph[folder] - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    reach = {folder: reached(folder, set()) for folder in graph}
    group = {a: tuple(sorted({a} | {b for b in graph if b in reach[a] and a in reach[b]})) for a in graph}
    return {group[a]: {group[b] for c in group[a] for b in graph[c]} - {group[a]} for a in graph}


def reduced(graph: dict[Group, set[Group]]) -> dict[Group, set[Group]]:
    """Without the arrows to what is reached by a longer way too."""

    def reached(group: Group) -> set[Group]:
        return graph[group].union(*(reached(other) for other in graph[group]))

    return {
        group: {other for other in others if not any(other in reached(third) for third in others)}
        for group, others in graph.items()
    }


def layers(graph: dict[Group, set[Group]]) -> list[list[Group]]:
    """Those that import nothing first; each above all that it imports."""

    def level(group: Group) -> int:
        return 1 + max(map(level, graph[group]), default=-1)

    rows: list[list[Group]] = [[] for _ in range(1 + max(map(level, graph)))]
    for group in graph:
        rows[level(group)].append(group)
    return rows


def _targets(node: ast.stmt, parts: tuple[str, ...]) -> Iterator[str]:
    """Modules that a statement of the module imports, by their whole names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(parts[: -node.level] if node.level else ())
        yield from (f"{base}.{node.module or ''}.{alias.name}".replace("..", ".").strip(".") for alias in node.names)
