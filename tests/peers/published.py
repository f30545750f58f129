"""Two published students of Marian, English and Portuguese, and Mozilla's engine as their judge."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from export.validate.origin.marian import MarianNetwork
from mlx_transformer.families.marian_files.items import Item, read_bin
from mlx_transformer.families.marian_files.options import parse_options

HERE = Path(__file__).parent
PYTHON = os.environ.get("PEERS_PYTHON", "")
SECONDS = 600
LINES = (HERE / "lines.en").read_text(encoding="utf-8").splitlines()


@cache
def installed(package: str) -> Path:
    """The folder of a package in the peers' environment."""
    if not PYTHON:
        raise RuntimeError("run make test-peers, which installs the peers")
    told = f"import importlib.util; print(importlib.util.find_spec('{package}').submodule_search_locations[0])"
    done = subprocess.run([PYTHON, "-c", told], capture_output=True, text=True, timeout=SECONDS, check=True)
    return Path(done.stdout.strip())


@dataclass(frozen=True)
class Published:
    """The files of one model."""

    pair: str
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / f"model.{self.pair}.intgemm.alphas.bin"

    @property
    def vocabulary(self) -> Path:
        return self.folder / f"vocab.{self.pair}.spm"

    @property
    def shortlist(self) -> Path:
        return self.folder / f"lex.50.50.{self.pair}.s2t.bin"

    def items(self) -> tuple[dict[str, Item], dict[str, Any]]:
        *items, options = read_bin(self.model)
        return {item.name: item for item in items}, parse_options(options.text(), str(self.model))

    def network(self, arithmetic: str) -> MarianNetwork:
        return MarianNetwork.read(self.model, arithmetic)


def limit(source: Sequence[int]) -> int:
    """Most pieces that the judge writes for so many, </s> counted."""
    return min(2 * len(source) + 4, 256)


def peers(tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `with_fxtranslate.py` answers."""
    if not PYTHON:
        raise RuntimeError("run make test-peers, which installs the peers")
    command = [PYTHON, str(HERE / "with_fxtranslate.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, input=json.dumps(tasks), capture_output=True, text=True, timeout=SECONDS, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"with_fxtranslate.py failed: {done.stderr[-500:]}")
    return json.loads(done.stdout)


@cache
def published() -> dict[str, Published]:
    """{pair: model}"""
    folder = Path(peers([])["models"])
    return {pair: Published(pair, next(folder.glob(f"{pair}-*"))) for pair in ("enpt", "pten")}


def judged(model: Published, lines: Sequence[str], shortlist: bool = False, /, **files: Path) -> tuple[str, list[str]]:
    """The engine's backend and its translations. files: others in place of the model's own."""
    own = {"model": model.model, "source": model.vocabulary, "target": model.vocabulary}
    paths = {name: str(path) for name, path in {**own, **files}.items()}
    task = {**paths, "shortlist": str(model.shortlist) if shortlist else None, "lines": [*lines]}
    (answer,) = peers([task])["answers"]
    return answer["backend"], answer["texts"]
