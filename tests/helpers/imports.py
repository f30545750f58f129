"""Which module imports what, read from the syntax trees of both packages."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mlx_transformer", "export")


@dataclass(frozen=True)
class Import:
    """`target` is a dotted module name, or module.name for `from module import name`."""

    target: str
    line: int
    lazy: bool  # inside a function, or for type checkers only: not run by importing the module


def module_name(path: Path) -> str:
    """export/validate/report/data.py -> export.validate.report.data; a package is called package.__init__."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def resolve_from(node: ast.ImportFrom, module: str) -> str:
    """The absolute module that `from ... import` names; `module` as `module_name` gives it."""
    if not node.level:
        return node.module or ""
    return ".".join(module.split(".")[: -node.level] + ([node.module] if node.module else []))


@cache
def imports_of(source: str, module: str) -> tuple[Import, ...]:
    """Every import statement and every import_module("constant") of a module, those for type checkers included."""
    imports: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.Import):
            imports.extend(Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_from(node, module)
            # Always the longest name: whether it is a module or a value, the rules below look at prefixes.
            imports.extend(Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.Call):
            called = _name(node.func)
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                imports.append(Import(str(first.value), node.lineno, lazy))
        is_lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for_types = node.body if isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING" else []
        for child in ast.iter_child_nodes(node):
            visit(child, is_lazy or child in for_types)

    visit(ast.parse(source), False)
    return tuple(imports)


def _name(node: ast.expr) -> str:
    """The last part of a dotted name; nothing for what is none."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
