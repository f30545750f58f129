"""Names that packages hand on: each is there, is listed and is what its module has; an extra that a message names
exists."""

import importlib
import re
import tomllib

import pytest
from imports import ROOT, modules

from mlx_transformer.system.lazy import lazy

FACES = sorted(
    name.removesuffix(".__init__") for name, path in modules().items() if "= lazy(" in path.read_text(encoding="utf-8")
)


def test_eight_packages_hand_names_on() -> None:
    assert len(FACES) >= 8


@pytest.mark.parametrize("package", FACES)
def test_every_name_is_there(package: str) -> None:
    face = importlib.import_module(package)
    assert dir(face) == sorted(face.__all__)
    for name in face.__all__:
        assert getattr(face, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = face.nothing


@pytest.mark.parametrize("package", FACES)
def test_type_checkers_know_the_same_names(package: str) -> None:
    """`import x as x` hands a name on in a package with py.typed."""
    source = modules()[f"{package}.__init__"].read_text(encoding="utf-8")
    known = [name for name, same in re.findall(r"\b(\w+) as (\w+)$", source, re.M) if name == same]
    renamed = re.findall(r"^    (\w+) = _\w+$", source, re.M)
    assert sorted([*known, *renamed]) == sorted(importlib.import_module(package).__all__)


def test_another_name_of_the_module() -> None:
    get, names, everything = lazy("here", {"parse": "json:loads", "path": "os"})
    assert get("parse")("[1]") == [1]
    assert names() == everything == ["parse", "path"]


def test_extras_that_messages_name_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in modules().values())
    named = set(re.findall(r"needs\(['\"](\w+)['\"]\)", sources))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"serve", "text", "plots", "data"} <= named <= project["optional-dependencies"].keys()
    assert "in the project's folder" not in sources
