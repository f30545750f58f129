"""Old names of modules that documents showed up to version 0.1: importing one gives the module that it became."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

PACKAGE = __name__.partition(".")[0]
PACKAGES = ("spec", "compare")  # which are no more
CORE = "config parameters positions quantization adapter checkpoint tokenizer tokenizer_files folders".split()
SYSTEM = "errors fields files durable manifest tensors process progress terminal".split()
MODULES = {f"spec.{name}": f"core.{name}" for name in CORE} | {f"spec.{name}": f"system.{name}" for name in SYSTEM}
MODULES |= {
    "spec.versions": "system.machine",
    "spec.memory": "system.machine",
    "scoring": "generation.scoring",
    "generation.with_mlx": "runtime.decoding",
    "compare.run": "report.comparing",
    "training.merge": "convert.merge",
    "training.average": "convert.average",
    "training.schedule": "training.optimizers",
}


class OldNames:
    """The last finder of `sys.meta_path`: it is asked for what no file is named. As its own loader it hands on the
    module that a name became, which stays what it is."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, old = name.partition(".")
        if package != PACKAGE or not (old in PACKAGES or old in MODULES):
            return None
        return ModuleSpec(name, self, is_package=old in PACKAGES)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        new = MODULES.get(spec.name.partition(".")[2])
        if new is None:
            return None  # an empty package
        module = import_module(f"{PACKAGE}.{new}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


def find_old_names() -> None:
    """Find modules by their old names too, from now on."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())  # type: ignore[arg-type]
