"""Pages of the API: what both packages hand on at their top, then every folder's modules, from their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

from .pages import PACKAGES


def api_pages(root: Path) -> dict[str, str]:
    """Path of a page -> its text, with a directive of mkdocstrings for each name or module."""
    pages = {f"api/{package}.md": _face(root, package) for package in PACKAGES}
    for package in PACKAGES:
        folders = {path.parent for path in (root / package).rglob("*.py")} - {root / package}
        for folder in sorted(folders):
            modules = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
            if modules:
                name = folder.relative_to(root).as_posix()
                named = [".".join(path.relative_to(root).with_suffix("").parts) for path in modules]
                pages[f"api/{name}.md"] = "\n\n".join([f"# {name}", *map(_module, named)])
    return pages


def _face(root: Path, package: str) -> str:
    """The names that a package hands on, each where it is defined: read from its call of `lazy`."""
    tree = ast.parse((root / package / "__init__.py").read_text(encoding="utf-8"))
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "lazy")
    homes: dict[str, str] = ast.literal_eval(next(calls).args[1])
    texts = [f"# {package}", f"What `import {package}` hands on."]
    texts += [f"::: {_definition(root, package, home, name)}" for name, home in homes.items() if name[0] != "_"]
    return "\n\n".join(texts)


def _definition(root: Path, package: str, home: str, name: str) -> str:
    """The dotted name of what `home` (see `lazy`) gives: a folder's face hands on what one of its modules defines."""
    module, _, other = home.partition(":")
    folder = root / (f"{package}{module}" if module.startswith(".") else module).replace(".", "/")
    files = [folder.with_suffix(".py")] if not folder.is_dir() else sorted(folder.glob("*.py"))
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == (other or name):
                parts = file.relative_to(root).with_suffix("").parts
                return ".".join([*(part for part in parts if part != "__init__"), node.name])
    raise LookupError(f"{package}.{name}: no definition in {home}")


def _module(name: str) -> str:
    return f"::: {name}"
