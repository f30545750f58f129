"""Old names of modules that documents showed up to version 0.1: importing one gives the module that it became.

Imported when a name is asked for that no file has (`lazy.find_old_names`).
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False  # typing's own takes longer to import than all that is here
if TYPE_CHECKING:
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


def find_moved(name: str) -> ModuleSpec | None:
    """Find a module by the name that it had, "mlx_transformer.spec.config"; None if there never was one."""
    old = name.partition(".")[2]
    if not (old in PACKAGES or old in MODULES):
        return None
    return ModuleSpec(name, Loader(), is_package=old in PACKAGES)  # type: ignore[arg-type]


class Loader:
    """Hand on the module that a name became, which stays what it is."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        new = MODULES.get(spec.name.partition(".")[2])
        if new is None:
            return _OldPackage(spec.name)
        module = import_module(f"{PACKAGE}.{new}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


class _OldPackage(ModuleType):
    """An empty package, which importing puts in the place of a function of that name: `mlx_transformer.compare(...)` is
    that function all the same."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        function = getattr(import_module(f"{PACKAGE}.commands.models"), self.__name__.rpartition(".")[2])
        return function(*arguments, **options)
