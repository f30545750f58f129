"""The tests on as many machines as this one can pass for, and a table of them at the end. `make test-machines`.

Other BLAS kernels (OPENBLAS_CORETYPE, where the processor has the instructions), one core, an ordinary user without a
home, another locale, umask and time zone, a GPU's choices, and every Python from 3.11 on that is there. A machine that
can't be had here is listed with the reason. The exit status is 1 if a test failed on any of them.

python tests/machines.py [--only NAME,NAME] [--list] [arguments of pytest]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / ".machines"  # one log a machine
VENVS = ROOT / ".venv-machines"
CHOSEN = ["-m", "not slow and not consumers"]
# OpenBLAS's name of a kernel -> the flag in /proc/cpuinfo without which it would end in an illegal instruction.
KERNELS = {"Prescott": "pni", "Nehalem": "sse4_2", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512f"}
STRANGER = 12345  # a user that the system doesn't know, as in many containers


@dataclass(frozen=True)
class Machine:
    """How pytest is started there. `missing`: why it can't be."""

    name: str
    variables: Mapping[str, str | None] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    python: str | None = None
    stranger: bool = False
    umask: int = -1
    workers: int | None = None
    missing: str = ""


@dataclass(frozen=True)
class Outcome:
    machine: Machine
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    said: str = ""

    @property
    def good(self) -> bool:
        return bool(self.machine.missing) or (self.passed > 0 and not self.failed and not self.said)


def machines() -> list[Machine]:
    """All of them, those that can't be had too."""
    found = [_kernel(name, flag) for name, flag in KERNELS.items()]
    there = "" if shutil.which("taskset") else "no taskset"
    found.append(Machine("one core", command=("taskset", "-c", "0"), workers=1, missing=there))
    # What POSIX says of an unset locale, without Python's own remedies; 14 hours ahead of Greenwich.
    plain = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "TZ": "Pacific/Kiritimati"}
    found.append(Machine("C locale, umask 077", plain, umask=0o077))
    found.append(Machine("a GPU's choices", {"MLX_TRANSFORMER_DEVICE_CHOICES": "gpu"}))
    found.append(_ordinary_user())
    own = _version(sys.executable)
    for version, path in pythons().items():
        if version != own:
            found.append(Machine(f"Python {version}", python=path))
    return found


def _kernel(name: str, flag: str) -> Machine:
    cpuinfo = Path("/proc/cpuinfo")
    flags = (
        set(re.findall(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.M)[0].split())
        if cpuinfo.exists()
        else set()
    )
    missing = "" if flag in flags else f"this processor has no {flag}"
    return Machine(f"OpenBLAS {name}", {"OPENBLAS_CORETYPE": name}, missing=missing)


def _ordinary_user() -> Machine:
    """Root becomes a user that the system doesn't know; anybody else stays who they are."""
    name, nowhere = "user without a home", {"HOME": None, "USER": None, "LOGNAME": None}
    if os.geteuid() != 0:
        return Machine(name, {**nowhere, "HOME": "/nonexistent"})
    for path in (sys.executable, *pythons(STRANGER).values()):
        if _runs(path, STRANGER):
            return Machine(name, nowhere, python=None if path == sys.executable else path, stranger=True)
    return Machine(name, missing="no Python that another user may run")


def pythons(user: int | None = None) -> dict[str, str]:
    """{version "3.12": path} of interpreters that can make environments: in PATH, and where pyenv puts them."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    folders += map(str, Path("~/.pyenv/versions").expanduser().glob("*/bin"))
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted(Path(folder).glob("python3.*")) if Path(folder).is_dir() else []:
            number = re.fullmatch(r"python3\.(\d+)", path.name)
            version = path.name.removeprefix("python")
            if number and int(number[1]) >= 11 and version not in found and _runs(str(path), user):
                found[version] = str(path)
    return dict(sorted(found.items(), key=lambda item: int(item[0].split(".")[1])))


def _runs(path: str, user: int | None) -> bool:
    who = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    try:
        return subprocess.run([path, "-c", "import venv"], capture_output=True, cwd="/", **who).returncode == 0
    except OSError:
        return False


def _version(python: str) -> str:
    code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def environment_for(python: str) -> str:
    """The interpreter of an environment with this project's packages, made once under .venv-machines."""
    stamp = "-".join(Path(python).resolve().parts[1:])
    folder = VENVS / stamp
    if not (folder / ".installed").exists():
        print(f"Making {folder.relative_to(ROOT)}, once; this takes a minute or two", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        install = ["--quiet", "--no-input", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
        target = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
        subprocess.run([*target, *install, "setuptools>=77", "wheel"], check=True)
        subprocess.run([*target, *install, "-e", f"{ROOT}[dev]"], check=True)
        (folder / ".installed").touch()
    return str(folder / "bin" / "python")


def run(machine: Machine, workers: int, arguments: Iterable[str]) -> Outcome:
    """All chosen tests on one machine; its output goes to a file in .machines."""
    begin = time.monotonic()
    python = sys.executable if machine.python is None else environment_for(machine.python)
    LOGS.mkdir(exist_ok=True)
    log = LOGS / (re.sub(r"\W+", "-", machine.name).strip("-").lower() + ".log")
    with tempfile.TemporaryDirectory() as scratch:
        place, who = ROOT, {}
        if machine.stranger:
            place = _copied(Path(scratch) / "project")
            who = {"user": STRANGER, "group": STRANGER, "extra_groups": []}
            _give_away(Path(scratch))
        report = Path(scratch) / "report.xml"
        parallel = ["-n", str(machine.workers or workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        command = [*machine.command, python, "-m", "pytest", "-q", *parallel, *CHOSEN, f"--junitxml={report}"]
        variables = {**os.environ, "PYTHONPATH": str(place), "TMPDIR": scratch, **machine.variables}
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                [*command, *arguments],
                cwd=place,
                env={name: value for name, value in variables.items() if value is not None},
                umask=machine.umask,
                stdout=output,
                stderr=subprocess.STDOUT,
                **who,  # type: ignore[arg-type]
            )
        counts = _counts(report)
    said = "" if done.returncode in (0, 1) and counts else f"pytest ended with {done.returncode}: see {log}"
    return Outcome(machine, *counts or (0, 0, 0), time.monotonic() - begin, said)


def _copied(place: Path) -> Path:
    """The working tree without what git ignores, in a folder of the stranger's own."""
    listing = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def _give_away(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    folder.chmod(stat.S_IRWXU)


def _counts(report: Path) -> tuple[int, int, int] | None:
    """(passed, failed, skipped)"""
    if not report.exists():
        return None
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped"))
    failed = sum(int(suite.get(name, 0)) for suite in suites for name in ("failures", "errors"))
    return tests - failed - skipped, failed, skipped


def table(outcomes: Iterable[Outcome]) -> str:
    lines = [f"{'machine':24}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    for o in outcomes:
        if o.machine.missing:
            lines.append(f"{o.machine.name:24}not to be had here: {o.machine.missing}")
        else:
            numbers = f"{o.passed:>8}{o.failed:>8}{o.skipped:>9}{o.seconds:>9.0f}"
            lines.append(f"{o.machine.name:24}{numbers}" + (f"   {o.said}" if o.said else ""))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of machines, or parts of them, separated by commas")
    parser.add_argument("--list", action="store_true", help="name the machines, and end")
    parser.add_argument("--workers", type=int, default=2, help="test processes (default: 2)")
    options, arguments = parser.parse_known_args()
    chosen = machines()
    if options.only is not None:
        wanted = [part.strip().lower() for part in options.only.split(",")]
        unknown = [part for part in wanted if not any(part in machine.name.lower() for machine in chosen)]
        if unknown:
            parser.error(f"no machine is called {unknown[0]!r}: {', '.join(machine.name for machine in chosen)}")
        chosen = [machine for machine in chosen if any(part in machine.name.lower() for part in wanted)]
    if options.list:
        print("\n".join(f"{machine.name:24}{machine.missing}".rstrip() for machine in chosen))
        return 0
    outcomes = []
    for machine in chosen:
        outcomes.append(Outcome(machine) if machine.missing else run(machine, options.workers, arguments))
        print(table(outcomes[-1:]).splitlines()[1], flush=True)
    print(f"\n{table(outcomes)}")
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
