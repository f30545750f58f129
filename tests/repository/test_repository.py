"""The repository itself: nothing of one machine in it, nothing large, every dependency declared and pinned."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from assemble.problem import Problem
from assemble.symbols import definition
from imports import PACKAGES, ROOT, imports_of, modules
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from mlx_transformer.system.lazy import EXTRA_OF

LARGEST_FILE = 1_000_000  # bytes
# A path that exists on one person's machine only.
PERSONAL_PATH = re.compile(r"(?<![\w.$}/-])/(?:home|Users|root|work|mnt|media)/\w")
MARKDOWN_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]+))?\)")
DISTRIBUTION = "mlx-transformer"
# Modules that are imported only where an extra is installed, and may therefore import its packages at their top.
EXTRAS = {
    f"export.serve.{name}": "serve"
    for name in (*("app", "calls", "connections", "metrics", "requests", "server", "site", "translating"),)
}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Paths under version control, relative to the root."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # safe.directory: the checkout may belong to another user, as in a container.
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def text_of(name: str) -> str:
    """A file's text, or nothing for a binary file."""
    data = (ROOT / name).read_bytes()
    return "" if b"\0" in data[:8192] else data.decode("utf-8", errors="replace")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def test_no_path_of_one_machine(tracked: list[str]) -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name in tracked
        for number, line in enumerate(text_of(name).splitlines(), 1)
        if PERSONAL_PATH.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", ["cd " + "/home" + "/ann/x", 'open("' + "/Users" + '/bo/y")', "=" + "/root" + "/z"])
def test_path_of_one_machine_is_seen(line: str) -> None:
    assert PERSONAL_PATH.search(line)


def test_no_large_file(tracked: list[str]) -> None:
    sizes = {name: (ROOT / name).stat().st_size for name in tracked}
    assert not {name: size for name, size in sizes.items() if size > LARGEST_FILE}


def test_markdown_links_lead_somewhere(tracked: list[str]) -> None:
    broken = [
        f"{name}: {link}"
        for name in tracked
        if name.endswith(".md")
        for link, heading in MARKDOWN_LINK.findall(text_of(name))
        if not leads_somewhere(ROOT / name, link, heading)
    ]
    assert not broken, "\n".join(broken)


def leads_somewhere(page: Path, link: str, heading: str) -> bool:
    """To a file or folder, and there to a heading or an anchor if one is named, as GitHub names them; in code to a
    definition."""
    target = page.parent / link if link else page
    if not heading or not target.exists():
        return target.exists()
    if target.suffix == ".py":
        return defines(target, heading)
    text = target.read_text(encoding="utf-8") if target.is_file() else ""
    if f'<a id="{heading}"></a>' in text:
        return True
    lines = text.splitlines()
    headings = [re.sub(r"[^\w\s-]", "", line.lstrip("#").strip().lower()) for line in lines if line.startswith("#")]
    return heading in [words.replace(" ", "-") for words in headings]


def defines(file: Path, symbol: str) -> bool:
    try:
        return bool(definition(file, symbol).code)
    except Problem:
        return False


def test_links_that_lead_nowhere_are_seen() -> None:
    page = ROOT / "README.md"
    assert MARKDOWN_LINK.findall("[a](b.md#c-d) [e](#f) [g](https://h#i) [j](k)") == [
        ("b.md", "c-d"),
        ("", "f"),
        ("k", ""),
    ]
    assert leads_somewhere(page, "LICENSE", "")
    assert not leads_somewhere(page, "LICENCE", "")
    assert leads_somewhere(page, "", "from-python")
    assert not leads_somewhere(page, "", "from-ruby")
    assert leads_somewhere(page, "mlx_transformer/nn/attention.py", "Attention.kernel")
    assert not leads_somewhere(page, "mlx_transformer/nn/attention.py", "Attention.colonel")
    assert not leads_somewhere(page, "tests", "from-python")


def test_constraints_are_exact_versions_without_origin() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert "://" not in text
    assert not [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.!+]+( ; [\w\s=\"']+)?", line)]
    assert len(pins()) == len(lines), "a package is pinned twice"


def test_mlx_parts_have_one_version() -> None:
    versions = {str(pin.specifier) for name, pin in pins().items() if name == "mlx" or name.startswith("mlx-")}
    assert len(versions) == 1, versions


def declared() -> list[str]:
    """Requirements of the base and of all extras, without the distribution itself, whose extras some of them are."""
    extras = project()["optional-dependencies"].values()
    lines = [*project()["dependencies"], *(line for lines in extras for line in lines)]
    return [line for line in lines if Requirement(line).name != DISTRIBUTION]


def brought_by(extra: str) -> set[str]:
    """Names of the packages that an extra asks for itself."""
    return {canonicalize_name(Requirement(line).name) for line in project()["optional-dependencies"][extra]}


def test_extras_that_bring_what_is_missing() -> None:
    for package, extra in EXTRA_OF.items():
        assert package.replace("_", "-") in brought_by(extra)
    assert {canonicalize_name(Requirement(line).name) for line in project()["dependencies"]}.isdisjoint(
        package.replace("_", "-") for package in EXTRA_OF
    )
    [everything] = map(Requirement, project()["optional-dependencies"]["all"])
    assert everything.extras == {"train", "export", "data", "plots", "text", "serve", "hub", "chat"}
    [others_models] = map(Requirement, project()["optional-dependencies"]["convert"])
    assert others_models.extras == {"export", "hub", "chat"}


def required(requirement: Requirement, seen: set[tuple[str, str]]) -> Iterator[str]:
    """Names that installing `requirement` here brings in, itself included, as far as they are installed."""
    name = canonicalize_name(requirement.name)
    for extra in ("", *requirement.extras):
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        yield name
        try:
            children = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for child in map(Requirement, children):
            if child.marker is None or child.marker.evaluate({"extra": extra}):
                yield from required(child, seen)


def test_every_dependency_is_pinned() -> None:
    needed = {name for line in declared() for name in required(Requirement(line), set())}
    missing = needed - set(pins())
    assert not missing, f"add to constraints.txt: {sorted(missing)}"


def test_lower_bounds_allow_the_pins() -> None:
    for line in declared():
        requirement = Requirement(line)
        assert requirement.specifier, f"{line}: give a lower bound"
        version = next(iter(pins()[canonicalize_name(requirement.name)].specifier)).version
        assert requirement.specifier.contains(version), f"{line} excludes the pinned {version}"


def test_lowest_versions_are_the_lower_bounds() -> None:
    """What `make test-lowest` installs is what pyproject.toml promises."""
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    lowest = {canonicalize_name(one.name): one for one in map(Requirement, (x for x in lines if x and x[0] != "#"))}
    tried = [*project()["dependencies"], *(x for e in TRIED for x in project()["optional-dependencies"][e])]
    for requirement in map(Requirement, tried):
        pin = lowest[canonicalize_name(requirement.name)]
        [bound] = [one.version for one in requirement.specifier if one.operator == ">="]
        assert Version(next(iter(pin.specifier)).version) == Version(bound), f"{requirement} is tried as {pin}"


TRIED = ("train", "export", "serve", "data")
"""The extras that `make test-lowest` installs."""

WHERE_INSTALLED = {"wandb", "claims", "mlx_lm", "torch", "transformers"}
"""What no extra brings: programs of a service that who uses it has installed, docs/claims of a clone, and what runs the
original of an imported model (`validate --against`)."""


def test_every_third_party_import_is_declared() -> None:
    """At module level only what every installation has and what `EXTRA_OF` has words for; inside a function also what
    an extra brings."""
    extras = project()["optional-dependencies"]
    always = {canonicalize_name(Requirement(line).name) for line in project()["dependencies"]}
    optional = {canonicalize_name(Requirement(line).name) for lines in extras.values() for line in lines}
    owners = metadata.packages_distributions()
    problems = []
    for module, path in modules().items():
        for entry in imports_of(path.read_text(encoding="utf-8"), module):
            top = entry.target.partition(".")[0]
            if (
                top in sys.stdlib_module_names
                or top in PACKAGES
                or top in EXTRA_OF
                or (entry.lazy and top in WHERE_INSTALLED)
            ):
                continue
            own = {canonicalize_name(Requirement(line).name) for line in extras.get(EXTRAS.get(module, ""), ())}
            allowed = always | optional if entry.lazy else always | own
            if not {canonicalize_name(owner) for owner in owners.get(top, [top])} & allowed:
                problems.append(f"{module.replace('.', '/')}.py:{entry.line}: {top} is no declared dependency")
    assert not problems, "\n".join(problems)


def test_version_is_the_declared_one() -> None:
    assert metadata.version(DISTRIBUTION) == project()["version"], "run make setup-dev"


def test_the_citation_has_the_declared_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {project()['version']}\n" in text
    program, _, _ = project()["license"].partition(" AND ")  # the other is that of the built-in phrases
    assert f"\nlicense: {program}\n" in text
    assert f"\ntitle: {DISTRIBUTION}\n" in text
