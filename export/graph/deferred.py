"""Leaves sympy out of the start: onnx_ir imports it for dimensions that are expressions, which no graph here has. That
is a third of a second and 33 MB of every export and validate. It is loaded as soon as something asks for it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

READER = "onnx_ir._symbolic_shapes"  # what onnx_ir reads such expressions with; it takes functions out of sympy
IMPORTER = "onnx_ir._core"


class Deferred:
    """Finds the two modules where onnx_ir imports them, and for nobody else."""

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
