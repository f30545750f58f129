"""Old names of modules: each gives the module that it became, and a name that never was stays an error."""

import importlib
import sys

import pytest

import mlx_transformer
from mlx_transformer.system.moved import MODULES


@pytest.mark.parametrize(("old", "new"), sorted(MODULES.items()))
def test_an_old_name_is_the_module_that_it_became(old: str, new: str) -> None:
    module = importlib.import_module(f"mlx_transformer.{new}")
    spec = module.__spec__
    sys.modules.pop(f"mlx_transformer.{old}", None)
    assert importlib.import_module(f"mlx_transformer.{old}") is module
    assert module.__spec__ is spec
    assert module.__name__ == f"mlx_transformer.{new}"


def test_names_are_imported_from_old_packages() -> None:
    from mlx_transformer.core.config import TransformerConfig
    from mlx_transformer.spec import config  # type: ignore[import-not-found]
    from mlx_transformer.spec.config import TransformerConfig as OldConfig  # type: ignore[import-not-found]

    assert OldConfig is TransformerConfig
    assert config.TransformerConfig is TransformerConfig


def test_what_never_was_is_no_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"mlx_transformer\.spec\.nothing"):
        importlib.import_module("mlx_transformer.spec.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mlx_transformer.nothing")
    assert mlx_transformer.load is not None


def test_an_old_package_hides_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing mlx_transformer.compare.run sets the attribute `compare` of the package."""
    from mlx_transformer.commands import models

    importlib.import_module("mlx_transformer.compare.run")
    monkeypatch.setattr(models, "compare", lambda *arguments, **options: (arguments, options))
    assert mlx_transformer.compare("a", "b", source=[]) == (("a", "b"), {"source": []})
