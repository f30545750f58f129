"""Names that packages hand on: each is there, is listed and is what its module has; an extra that a message names
exists."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from imports import ROOT, modules

from mlx_transformer.system.lazy import lazy, needs

FACES = sorted(
    name.removesuffix(".__init__")
    for name, path in modules().items()
    if name.endswith(".__init__") and "= lazy(" in path.read_text(encoding="utf-8")
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


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        ({}, "mlx-transformer[export]"),
        ({"url": "file:///a%20b/m-1.whl", "archive_info": {}}, "/a b/m-1.whl[export]"),
        ({"url": "file:///src/m", "dir_info": {}}, "/src/m[export]"),
        ({"url": "https://h.org/m-1.whl", "archive_info": {}}, "mlx-transformer[export] @ https://h.org/m-1.whl"),
        (
            {"url": "https://h.org/m.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "mlx-transformer[export] @ git+https://h.org/m.git@abc",
        ),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="paths")
def test_an_extra_is_installed_from_where_the_distribution_came(origin, requirement, tmp_path) -> None:
    """As pip writes it down (PEP 610); a copy of the package that is no clone reads it."""
    shutil.copytree(ROOT / "mlx_transformer" / "system", tmp_path / "mlx_transformer" / "system")
    (tmp_path / "mlx_transformer" / "__init__.py").touch()
    metadata = tmp_path / "mlx_transformer-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-transformer\nVersion: 9\n")
    if origin:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    code = "from mlx_transformer.system.lazy import needs; print(needs('export'))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert said.stdout == f"pip install '{requirement}'\n", said.stderr


def test_an_extra_of_a_clone(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert needs("train,export") == "pip install -e '.[train,export]'"
    monkeypatch.chdir(tmp_path)
    assert needs("export") == f"pip install -e '{ROOT}[export]'"


def test_extras_that_messages_name_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in modules().values())
    named = set(re.findall(r"needs\(['\"](\w+)['\"]\)", sources))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"serve", "text", "plots", "data"} <= named <= project["optional-dependencies"].keys()
    assert "in the project's folder" not in sources


STRANGER = "raise SystemExit('the stranger ran')"


def beside_another_export(folder: Path, name: str, code: str) -> subprocess.CompletedProcess[str]:
    """In a folder that is searched first and has an `export` of its own."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(STRANGER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["export.py", "export/__init__.py"])
@pytest.mark.parametrize(
    "code",
    [
        "import mlx_transformer as mt; mt.OnnxTransformer",
        "import mlx_transformer as mt; mt.validate",
        "import mlx_transformer as mt; mt.open_model('one.onnx')",
        "import mlx_transformer as mt; mt.export('model', 'onnx')",
        "import mlx_transformer as mt; mt.serve('onnx')",
        "from mlx_transformer.cli import main; main(['translate', 'onnx', 'one'])",
    ],
)
def test_another_export_in_the_way_is_named(tmp_path: Path, name: str, code: str) -> None:
    """As the folders of many projects have it: it is found first, and not run."""
    (tmp_path / "one.onnx").touch()
    done = beside_another_export(tmp_path, name, code)
    said = f"{tmp_path / name}: is another 'export' than this project's, and found first; rename it"
    assert said in done.stderr.splitlines()[-1]
    assert done.returncode == (2 if "main" in code else 1)


def test_another_export_is_nobodys_matter_where_none_is_needed(tmp_path: Path) -> None:
    code = "import mlx_transformer as mt; print(mt.Transformer.__name__, mt.TransformerConfig)"
    done = beside_another_export(tmp_path, "export.py", code)
    assert (done.returncode, done.stdout.split()[0]) == (0, "Transformer"), done.stderr
