"""The wheel and the sdist: built, installed in empty environments, and tried outside the checkout. `make dist`.

The wheel is installed with what trains and exports, the sdist with every extra that runs on a CPU. Each then trains a
few steps, exports, proves and translates in a folder of its own, with no file of the checkout in reach. The wheel as it
is, without extras, then runs the model that was exported, and names the extra where it can't. The exit status is 1 if
anything of it fails; what was built is in dist/.

python tests/dist.py [--keep] [--address https://HOST/OWNER/NAME]

keep: leave the environments in build/dist. address: where the sources of this version are published, under its tag; the
wheel's metadata and the links of its README then lead there, which the tree itself can't know.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PLACE = ROOT / "build" / "dist"
PACKAGES = ("mlx_transformer", "export")
# Of a package's files; its reference pages stay behind.
SUFFIXES = {".py", ".toml", ".json", ".html", ".css", ".js", ".svg", ".txt", ".gz", ".safetensors"}
EXTRAS = "[all]"
SECONDS = 300  # for one command; the longest takes some 20

SERVE = """
import json, subprocess, sys, urllib.request
command = [sys.executable, "-m", "export", "serve", "onnx", "--port", "0"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    address = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
    body = json.dumps({"text": "May 3, 2024"}).encode()
    request = urllib.request.Request(address.rstrip("/.") + "/translate", body, {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    assert isinstance(answer["translations"], list), answer
finally:
    server.terminate()
    assert server.wait(60) == 0
"""
TEXT = """
from export import SearchModel
[line] = SearchModel("text.onnx").translate(["May 3, 2024"])
assert isinstance(line, str)
"""
TRANSLATE = """
import sys
from mlx_transformer import OnnxTransformer
[line] = OnnxTransformer(sys.argv[1]).translate(["May 3, 2024"])
print(line)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the environments in build/dist")
    parser.add_argument("--address", help="where the sources are published: https://HOST/OWNER/NAME")
    options = parser.parse_args()
    if options.address and not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", options.address):
        parser.error(f"--address: must be https://HOST/OWNER/NAME, not {options.address!r}")
    try:
        wheel, sdist = build(options.address)
        for file, extras in ((wheel, "[train,export]"), (sdist, EXTRAS), (wheel, "")):
            begin = time.monotonic()
            python = installed(file, extras)
            if extras:
                model = try_out(python, extras == EXTRAS)
            else:
                try_base(python, model, file)
            size = f"{packages(python)} packages, {megabytes(python)} MB"
            print(f"{file.name}{extras}: installed and works, {time.monotonic() - begin:.0f} s; {size}", flush=True)
    except DistError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    finally:
        if not options.keep:
            shutil.rmtree(PLACE, ignore_errors=True)
    return 0


class DistError(Exception):
    """What did not work, and what it said."""


def build(address: str | None) -> tuple[Path, Path]:
    """Wheel and sdist in dist/, the wheel made from the sdist; both hold all of the packages' files."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    run([sys.executable, "-m", "build", "--outdir", DIST, addressed(address) if address else ROOT], PLACE)
    [wheel], [sdist] = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    expected = packaged()
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
        if address and not metadata.count(f"Project-URL: Repository, {address}\n"):
            raise DistError(f"{wheel.name} does not say where it comes from:\n{metadata[:2000]}")
        if dead := dead_links(metadata):
            raise DistError(f"{wheel.name}: its README leads to files that it doesn't come with: {dead[:5]}")
        compare(wheel, expected, {name for name in archive.namelist() if ".dist-info/" not in name})
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    compare(sdist, expected | {"LICENSE", "README.md", "pyproject.toml"}, names, more=True)
    return wheel, sdist


def dead_links(readme: str) -> list[str]:
    """Links and pictures that need the files beside the README."""
    targets = ("".join(found) for found in re.findall(r'\]\(([^)]*)\)|src="([^"]*)"', readme))
    return [target for target in targets if not target.startswith("https://")]


def addressed(address: str) -> Path:
    """A copy of the sources that says where they are published."""
    place = PLACE / "source"
    for name in tracked():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place / name)
    project = (place / "pyproject.toml").read_text(encoding="utf-8")
    tag = f"v{tomllib.loads(project)['project']['version']}"
    (place / "pyproject.toml").write_text(project + urls(address, tag), encoding="utf-8")
    readme = place / "README.md"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), address, tag), encoding="utf-8")
    return place


def urls(address: str, tag: str) -> str:
    """The table of pyproject.toml that the package index shows beside a project."""
    pages = {"Repository": "", "Documentation": f"/blob/{tag}/docs/README.md"}
    pages |= {"Changelog": f"/blob/{tag}/CHANGELOG.md", "Issues": "/issues"}
    return "\n[project.urls]\n" + "".join(f'{name} = "{address}{path}"\n' for name, path in pages.items())


def absolute(readme: str, address: str, tag: str) -> str:
    """Let the README's links lead to the repository: the index shows it without the files beside it."""
    linked = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({address}/blob/{tag}/\1)", readme)
    return re.sub(r'src="(?!https?:)([^"]+)"', rf'src="{address}/raw/{tag}/\1"', linked)


def tracked(*folders: str) -> list[str]:
    listing = run(["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", *folders], ROOT)
    return [name for name in listing.split("\0") if (ROOT / name).is_file()]


def packaged() -> set[str]:
    return {name for name in tracked(*PACKAGES) if Path(name).suffix in SUFFIXES or Path(name).name == "py.typed"}


def compare(file: Path, expected: set[str], names: set[str], more: bool = False) -> None:
    if missing := sorted(expected - names):
        raise DistError(f"{file.name} lacks {', '.join(missing[:5])} ({len(missing)} files)")
    if not more and (unknown := sorted(names - expected)):
        raise DistError(f"{file.name} holds {', '.join(unknown[:5])} ({len(unknown)} files that are no package's)")


def installed(file: Path, extras: str) -> Path:
    """The interpreter of a new environment with the file and its dependencies, in the versions of constraints.txt."""
    folder = PLACE / (re.sub(r"\W+", "-", file.name + extras) + "-env")
    run([sys.executable, "-m", "venv", folder], PLACE)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    run([*pip, "-c", ROOT / "constraints.txt", f"{file}{extras}"], PLACE, seconds=1200)
    return python


def packages(python: Path) -> int:
    """How many are installed beside the distribution itself and what Python brings."""
    listed = run([python, "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"], PLACE).splitlines()
    return len([line for line in listed if line.partition("==")[0] not in ("pip", "setuptools", "mlx-transformer")])


def megabytes(python: Path) -> int:
    """What the installed packages take on the disk, without pip and setuptools."""
    [site] = python.parents[1].glob("lib/python*/site-packages")
    files = (path for path in site.rglob("*") if path.is_file())
    own = ("pip", "setuptools", "pkg_resources")
    return sum(path.stat().st_size for path in files if not path.relative_to(site).parts[0].startswith(own)) // 10**6


def try_base(python: Path, model: Path, wheel: Path) -> None:
    """The model of an earlier trial in an environment that has nothing but what runs models."""
    place = tried(python)
    expected = run([python, "-c", TRANSLATE, model], place)
    if run([python.parent / "mlx-transformer", "translate", model, "May 3, 2024"], place) != expected:
        raise DistError(f"the command and OnnxTransformer differ: {expected!r}")
    for arguments, extra in ((["serve", model], "serve"), (["export", model, "x"], "export"), (["train"], "train")):
        done = subprocess.run(
            [python.parent / "mlx-transformer", *arguments], cwd=place, capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode != 2 or f"pip install '{wheel}[{extra}]'" not in done.stderr:
            raise DistError(f"{arguments[0]} without its extra: {done.returncode} {done.stderr}")


def tried(python: Path) -> Path:
    """A new folder in which an environment is tried."""
    place = python.parents[2] / f"{python.parents[1].name}-tried"
    place.mkdir()
    return place


def try_out(python: Path, everything: bool) -> Path:
    """Train, export, prove, translate, with all extras also serve and text in the graph; return the exported folder."""
    place = tried(python)
    program = python.parent / "mlx-transformer"
    origin = run([python, "-c", "import mlx_transformer as m, export; print(m.__file__, export.__file__)"], place)
    if not all(str(python.parents[1]) in path for path in origin.split()):
        raise DistError(f"the packages come from {origin.strip()}")
    sizes = ["--preset", "tiny", "--vocab-size", "600", "--steps", "20"]
    run([program, "train", "--corpus", "cldr:en-de", *sizes, "--out", "run"], place)
    run([program, "export", "run", "onnx", "--target", "cpu"], place)
    run([program, "validate", "run", "onnx"], place)
    (place / "lines.txt").write_text("May 3, 2024\n", encoding="utf-8")
    with_mlx = run([program, "translate", "run", "--input", "lines.txt"], place)
    with_onnx = run([python, "-m", "export", "translate", "onnx", "--input", "lines.txt"], place)
    if with_mlx != with_onnx:
        raise DistError(f"MLX translates to {with_mlx!r}, ONNX Runtime to {with_onnx!r}")
    if everything:
        run([program, "export", "run", "text.onnx", "--embed-tokenizer"], place)
        run([python, "-c", TEXT], place)
        run([python, "-c", SERVE], place)
    return place / "onnx"


def run(command: list, place: Path, seconds: float = SECONDS) -> str:
    """What a command printed. Nothing of the checkout is on its path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=place, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise DistError(f"{' '.join(map(str, command))}: no end after {seconds:.0f} s") from None
    if done.returncode:
        raise DistError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
