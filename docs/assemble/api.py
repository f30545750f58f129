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
    """The names that a package hands on, each where it is defined: read from its table of homes."""
    tree = ast.parse((root / package / "__init__.py").read_text(encoding="utf-8"))
    homes = next(n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_HOMES")
    table: dict[str, str] = ast.literal_eval(homes.value)
    texts = [f"# {package}", f"What `import {package}` hands on."]
    texts += [f"::: {package}.{_module_of(root, package, home, name)}.{name}" for name, home in table.items()]
    return "\n\n".join(texts)


def _module_of(root: Path, package: str, home: str, name: str) -> str:
    """The module below `home` that defines the name: a folder's face hands it on."""
    folder = root / package / home.replace(".", "/")
    files = [folder.with_suffix(".py")] if not folder.is_dir() else sorted(folder.glob("*.py"))
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return ".".join(file.relative_to(root / package).with_suffix("").parts)
    raise LookupError(f"{package}.{name}: no definition in {home}")


def _module(name: str) -> str:
    return f"::: {name}"
