"""`make dist ARGS="--address ..."`: the tree can't know where it is published, so what a release builds is told."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tomllib

import pytest
from imports import ROOT

MODULE = importlib.util.spec_from_file_location("dist", ROOT / "tests" / "dist.py")
dist = importlib.util.module_from_spec(MODULE)
MODULE.loader.exec_module(dist)

ADDRESS = "https://example.org/people/mlx-transformer"


@pytest.fixture(scope="module")
def checkout():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")


@pytest.fixture(scope="module")
def source(checkout, tmp_path_factory):
    dist.PLACE = tmp_path_factory.mktemp("dist")
    return dist.addressed(ADDRESS)


def test_the_metadata_leads_to_pages_that_are_there(source):
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    assert project["urls"] == {
        "Repository": ADDRESS,
        "Documentation": f"{ADDRESS}/blob/v{version}/docs/README.md",
        "Changelog": f"{ADDRESS}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{ADDRESS}/issues",
    }
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {**told, "urls": project["urls"]} == project


def test_the_readme_has_no_link_that_needs_the_files_beside_it(source):
    text = (source / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r'\]\(([^)]*)\)|src="([^"]*)"', text)
    assert len(targets) > 20
    own = re.compile(rf"{re.escape(ADDRESS)}/(blob|raw)/v[\d.]+/([\w./]+)(#[\w-]+)?")
    for target in map("".join, targets):
        found = own.fullmatch(target)
        assert found is not None or re.match(r"https://(arxiv|github)\.", target), target
        assert found is None or (ROOT / found[2]).exists(), target
        assert found is None or (found[1] == "raw") == target.endswith(".png")


def test_the_distribution_has_no_dead_link_without_an_address(tmp_path):
    """What hatchling makes of README.md by the substitutions in pyproject.toml."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(dist.dead_links(text)) > 20
    for each in tables["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert dist.dead_links(text) == []
    assert "[Attention Is All You Need](https://arxiv.org/abs/1706.03762)" in text
    assert "- Targets: `--target portable`" in text


def test_all_files_are_there_and_no_other_differs(source):
    names = dist.tracked()
    assert {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()} == set(names)
    changed = [name for name in names if (source / name).read_bytes() != (ROOT / name).read_bytes()]
    assert sorted(changed) == ["README.md", "pyproject.toml"]


def test_every_file_of_a_package_is_expected_in_the_wheel(checkout):
    left = {name for name in dist.tracked(*dist.PACKAGES) if not name.endswith(".md")} - dist.packaged()
    assert left == set()
