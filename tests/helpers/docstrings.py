"""Pairs for search from the machine's own text: what a function of the standard library is called, and the first
sentence of its documentation."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

OTHERS = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
SENTENCE_END = re.compile(r"(?<=[.!?])\s")
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def pairs() -> list[tuple[str, str]]:
    """(module and name as words, sentence), each sentence once, in an order that has nothing to do with modules."""
    found: dict[str, str] = {}
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root).with_suffix("").parts
        if not OTHERS & {*module}:
            for name, sentence in _documented(path):
                found.setdefault(sentence, f"{' '.join(module)} {name}".replace("_", " ").strip())
    return sorted(((name, sentence) for sentence, name in found.items()), key=lambda pair: pair[1][::-1])


def _documented(path: Path) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (documentation := ast.get_docstring(node)):
            paragraph = " ".join(documentation.split("\n\n")[0].split())
            sentence = SENTENCE_END.split(paragraph)[0]
            if 20 <= len(sentence) <= 200 and "\t" not in sentence:
                yield node.name, sentence
