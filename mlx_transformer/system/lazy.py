"""Names that a package hands on are imported on first use; and what a message says where they need an extra."""

from __future__ import annotations

import os
from functools import wraps

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")


def lazy(package: str, homes: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of a package whose names live elsewhere.

    homes: {name: module, as `import_module` takes it: ".transformer" is one inside the package}; "module:other" where
    the name is called otherwise there. For type checkers the package imports the names itself, under TYPE_CHECKING.
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
    """Raise `UserError` if `export`, which many call a file of theirs, would be another than the one beside this
    package. That one isn't run to find out."""
    from importlib.util import find_spec

    ours = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    try:
        spec = find_spec("export")
    except ValueError:  # a module without one stands for it: whoever put it there knows
        return
    place = spec.origin if spec is not None else None
    if place is not None and os.path.realpath(os.path.dirname(os.path.dirname(place))) != os.path.realpath(ours):
        from .errors import UserError

        raise UserError(
            f"{place}: is another 'export' than this project's, and found first; rename it, or work in another folder"
        )


def needs(extra: str) -> str:
    """Say how to install what an extra of the distribution brings, from where the distribution itself came.

    From a clone `pip install -e '.[export]'`, from a wheel `pip install '/downloads/mlx_transformer-1.0.whl[export]'`,
    from an index `pip install 'mlx-transformer[export]'`.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.isfile(os.path.join(root, "pyproject.toml")):  # a clone, installed as editable or not at all
        place = "." if os.path.realpath(root) == os.path.realpath(os.curdir) else root
        return f"pip install -e {_quoted(f'{place}[{extra}]')}"
    return f"pip install {_quoted(_requirement(extra, _direct_url()))}"


def _quoted(requirement: str) -> str:
    """Quote a requirement for a shell; its brackets would be a pattern."""
    from shlex import quote

    return f"'{requirement}'" if "'" not in requirement else quote(requirement)


def _direct_url() -> dict[str, Any]:
    """Return what pip wrote down of where the distribution came from (PEP 610); {} if it came from an index."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return json.loads(distribution("mlx-transformer").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}


def _requirement(extra: str, origin: dict[str, Any]) -> str:
    """Return the requirement of an extra as pip takes it; origin: as `_direct_url` returns it."""
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
    "ml_dtypes": "export",
}
"""The extra that brings a package which is imported wherever it is needed; of two, the one that installs
everywhere. A package that is needed in one place is asked for there, by `needs`."""


def what_is_missing(error: ModuleNotFoundError) -> str | None:
    """Say which package of an extra could not be imported, and how to install it; None: it is of no extra."""
    package = (error.name or "").split(".")[0]
    return f"{package}: {needs(EXTRA_OF[package])}" if package in EXTRA_OF else None


def naming_extra(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function say what the extra is called that it lacks; name: what the caller knows it by."""

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
