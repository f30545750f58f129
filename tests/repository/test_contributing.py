"""CONTRIBUTING.md and docs/where_to_change.md name today's files: each path in them is there, the map has every room of
both packages, and the files of each kind of change are counted as the commit has them that the page names."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from imports import PACKAGES, ROOT

TEXT, CHANGES = ((ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "docs/where_to_change.md"))
FILE = re.compile(r"`([\w./-]+(?:\.(?:py|js|md|json|toml|yaml)|/))`")
"""A path in backticks: a file, or a folder with its slash. NAME and X in it are for any name."""
ROOM = re.compile(r"(?:^  |\s{2,})([a-z]+/|[a-z]+\.py)(?=\s|,)", re.MULTILINE)
OTHERS_FILES = {"modeling_X.py", "configuration_X.py", "config.json", "generation_config.json"}
"""Those of `transformers` and of its folders."""
ROW = re.compile(r"^\| \[([^]]+)\]\(#([\w-]+)\) \| [^|]+ \| (\d+) \| (.+) \|$", re.MULTILINE)
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


def files_of_commit(subject: str) -> list[str]:
    """The code that the first commit with this subject changed."""
    log = ["log", "--reverse", "--no-merges", "--fixed-strings", f"--grep={subject}", "--format=%x00%s", "--name-only"]
    done = subprocess.run(["git", "-C", str(ROOT), *log], check=True, stdout=subprocess.PIPE, text=True)
    commits = (entry.split("\n") for entry in done.stdout.split("\0")[1:])
    files = next(names for title, *names in commits if title.startswith(subject))
    return [
        name for name in files if name.startswith(tuple(f"{p}/" for p in PACKAGES)) and name.endswith((".py", ".js"))
    ]


def test_paths_lead_somewhere() -> None:
    assert len(FILE.findall(TEXT)) > 3
    assert len(FILE.findall(CHANGES)) > 60
    assert missing(TEXT) == missing(CHANGES) == []


@pytest.mark.parametrize(("name", "section", "count", "subject"), ROW.findall(CHANGES))
def test_a_kind_of_change_takes_as_many_files_as_its_commit(name: str, section: str, count: str, subject: str) -> None:
    assert section in [re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in
                       re.findall(r"^## (.+)$", CHANGES, re.MULTILINE)]  # fmt: skip
    git = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    if subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() != "false":
        pytest.skip("no clone with its history")
    assert len(files_of_commit(subject)) == int(count), name


def test_all_kinds_of_change_are_in_the_table() -> None:
    assert len(ROW.findall(CHANGES)) == len(re.findall(r"^## ", CHANGES, re.MULTILINE)) == 7


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
