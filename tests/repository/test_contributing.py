"""CONTRIBUTING.md and docs/where_to_change.md name today's files: each path in them is there, the map has every room of
both packages, and the files of each kind of change are counted as the commit has them that the page names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from imports import PACKAGES, ROOT

TEXT, CHANGES = ((ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "docs/where_to_change.md"))
FILE = re.compile(r"`([\w./-]+(?:\.(?:py|js|md|json|toml|yaml)|/))`")
"""A path in backticks: a file, or a folder with its slash. NAME and X in it are for any name."""
ROOM = re.compile(r"(?:^  |\s{2,})([a-z]+/|[a-z]+\.py)(?=\s|,)", re.MULTILINE)
OTHERS_FILES = {"modeling_X.py", "configuration_X.py", "config.json", "generation_config.json"}
"""Those of `transformers` and of its folders."""
"""A kind of change: its name, its section, how many files, and the subject of a commit, or how that begins."""


def missing(text: str) -> list[str]:
    """The paths of a text that lead nowhere. A bare name is a file's somewhere in the packages or the tests."""
    named = dict.fromkeys(FILE.findall(text))
    return [name for name in named if name not in OTHERS_FILES and not any(found(name))]


def found(name: str) -> Iterator[Path]:
    pattern = re.sub(r"\b(?:NAME|X)\b", "*", name.rstrip("/"))
    yield from ROOT.glob(pattern)
    if "/" not in name:
        for place in (*PACKAGES, "tests"):
            yield from (ROOT / place).rglob(pattern)


def rooms() -> set[str]:
    """Folders of both packages."""
    folders = (path for package in PACKAGES for path in (ROOT / package).iterdir() if path.is_dir())
    return {f"{path.name}/" for path in folders if any(path.glob("*.*")) and not path.name.startswith("_")}


def test_paths_lead_somewhere() -> None:
    assert len(FILE.findall(TEXT)) > 3
    assert len(FILE.findall(CHANGES)) > 60
    assert missing(TEXT) == missing(CHANGES) == []


def test_a_path_that_leads_nowhere_is_seen() -> None:
    there = "`mlx_transformer/nn/X.py`, `layers.py`, `export/targets/NAME/`"
    assert missing(f"{there}, `export/reference/X.py`, `with_mlx.py`, `spec/`") == [
        "export/reference/X.py",
        "with_mlx.py",
        "spec/",
    ]


def test_the_map_has_every_room_and_no_other() -> None:
    drawn, _ = TEXT.split("```text")[1].split("\ndocs/", 1)
    named = {name for name in ROOM.findall(drawn) if name.endswith("/")} - {f"{package}/" for package in PACKAGES}
    assert named == rooms() - {"commands/"}
