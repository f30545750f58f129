"""Delays the import of sympy, which saves a third of a second and 33 MB in every export and validate.

onnx_ir imports sympy for dimensions that are expressions, and no graph here has any. It is loaded on first use.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

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
    if not any(isinstance(finder, Deferred) for finder in sys.meta_path):
        sys.meta_path.insert(0, Deferred())
