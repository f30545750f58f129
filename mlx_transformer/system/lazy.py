"""Lazy imports: a package's public names are imported on first use. A missing extra is named in the error."""

from __future__ import annotations

import os
import sys
from functools import wraps

TYPE_CHECKING = False  # importing typing takes longer than this whole module
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")


def lazy(package: str, homes: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` for a package whose public names live in other modules.

    homes: {name: module}, with ".core.config" for a module inside the package, and "module:other" if the name is
    `other` there. For type checkers the package also imports the names under TYPE_CHECKING.

    >>> __getattr__, __dir__, __all__ = lazy(__name__, {"TransformerConfig": ".core.config"})
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        module, _, other = homes[name].partition(":")
        if module.startswith("export"):
            check_export()
        return naming_extra(name)(lambda: getattr(import_module(module, package), other or name))()

    return get, lambda: sorted(homes), list(homes)


def check_export() -> None:
    """Raise `UserError` if `import export` would find another module first, e.g. the user's own export.py. It is not
    imported for this check."""
    from importlib.util import find_spec

    ours = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    try:
        spec = find_spec("export")
    except ValueError:  # sys.modules has an `export` without a spec, put there on purpose
        return
    place = spec.origin if spec is not None else None
    if place is not None and os.path.realpath(os.path.dirname(os.path.dirname(place))) != os.path.realpath(ours):
        from .errors import UserError

        raise UserError(
            f"{place}: is another 'export' than this project's, and found first; rename it, or work in another folder"
        )


def needs(extra: str) -> str:
    """The command that installs an extra, depending on how this package was installed.

    e.g. from a clone `pip install -e '.[export]'`, from a wheel
    `pip install '/downloads/mlx_transformer-1.0.whl[export]'`, from an index `pip install 'mlx-transformer[export]'`.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.isfile(os.path.join(root, "pyproject.toml")):  # a clone, installed as editable or not at all
        place = "." if os.path.realpath(root) == os.path.realpath(os.curdir) else root
        return f"pip install -e {_quoted(f'{place}[{extra}]')}"
    return f"pip install {_quoted(_requirement(extra, _direct_url()))}"


def _quoted(requirement: str) -> str:
    """Quote a requirement for the shell, to which its brackets would be a pattern."""
    from shlex import quote

    return f"'{requirement}'" if "'" not in requirement else quote(requirement)


def _direct_url() -> dict[str, Any]:
    """pip's record of the origin of this package (PEP 610); {} if it came from an index."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return json.loads(distribution("mlx-transformer").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}


def _requirement(extra: str, origin: dict[str, Any]) -> str:
    """The argument of `pip install` for an extra. origin: the result of `_direct_url`."""
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        return f"{url2pathname(urlsplit(url).path)}[{extra}]"
    if url and (vcs := origin.get("vcs_info")):
        return f"mlx-transformer[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"mlx-transformer[{extra}]" + (f" @ {url}" if url else "")


EXTRA_OF = {
    "mlx": "train",
    "sacrebleu": "export",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
}
"""{package: extra that installs it}; if several do, the one that installs on every platform.

Only packages that are imported in many places: a package used in one place is checked there, with `needs`.
"""


def what_is_missing(error: ModuleNotFoundError) -> str | None:
    """The missing package and how to install it, e.g. "onnx: pip install ..."; None if it belongs to no extra."""
    package = (error.name or "").split(".")[0]
    return f"{package}: {needs(EXTRA_OF[package])}" if package in EXTRA_OF else None


def naming_extra(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that a missing package raises "NAME needs PACKAGE: pip install ...". name: the function's
    public name."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call)
        def naming(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return call(*args, **kwargs)
            except ModuleNotFoundError as error:
                if missing := what_is_missing(error):
                    raise ModuleNotFoundError(f"{name} needs {missing}", name=error.name) from error
                raise

        return naming

    return decorate


# onnx_ir imports sympy for dimensions that are expressions, and no graph here has any: loading it on first use saves a
# third of a second and 33 MB in every export and validate.
READER = "onnx_ir._symbolic_shapes"  # onnx_ir's parser of such expressions; imports functions from sympy
IMPORTER = "onnx_ir._core"


class Deferred:
    """An import finder that loads sympy and `READER` lazily, but only while onnx_ir is importing them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        importer = sys.modules.get(IMPORTER)
        if name not in ("sympy", READER) or importer is None or hasattr(importer, "SymbolicDim"):
            return None
        from importlib.machinery import PathFinder
        from importlib.util import LazyLoader

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def defer() -> None:
    """Load sympy on first use, not with onnx_ir."""
    if not any(isinstance(finder, Deferred) for finder in sys.meta_path):
        sys.meta_path.insert(0, Deferred())
