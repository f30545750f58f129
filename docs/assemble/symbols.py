"""Where a name is defined in a Python file, read from its syntax tree: nothing is imported."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .problem import Problem


@dataclass(frozen=True)
class Definition:
    """Lines `first` to `last` of a file, counted from 1, decorators included."""

    first: int
    last: int
    code: str
    """Without the indentation that all its lines share."""


def definition(file: Path, symbol: str) -> Definition:
    """Of a function, class, method or constant, such as `Attention.kernel`. `Problem` if there is none."""
    lines, tree = _parsed(file)
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for name in symbol.split("."):
        node = next((child for child in body if name in _names(child)), None)
        if node is None:
            raise Problem(f"{file}: defines no {symbol}")
        body = getattr(node, "body", [])
    assert node is not None
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    last = node.end_lineno or node.lineno
    return Definition(first, last, textwrap.dedent("\n".join(lines[first - 1 : last])))


@cache
def _parsed(file: Path) -> tuple[list[str], ast.Module]:
    text = file.read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


def _names(node: ast.stmt) -> set[str]:
    """Those that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
