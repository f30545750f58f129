"""A part of the tests on an ARM processor that QEMU plays on this machine. `make test-arm64`; Linux, Debian's packages.

.arm64/ gets a small Debian for arm64 and the package index's wheels for it, both once. Its programs are started in
namespaces of their own, in which the kernel hands them to QEMU: that needs no root, and nothing of it is left on the
machine. A model is trained for two steps, exported, proven and run, and the tests of SLICE, or those that are named,
follow: all of it some ten times as slowly as on this machine itself. The exit status is 1 if anything fails there, 2 if
it can't be tried here.

python tests/arm64.py [--workers N] [arguments of pytest]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / ".arm64"
SYSTEM, WHEELS = PLACE / "system", PLACE / "wheels"
EMULATOR = "qemu-aarch64-static"
NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
PACKAGES = ["base-files", "bash", "coreutils", "dash", "libstdc++6", "python3"]
EXTRAS = ("train", "export", "serve")
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "httpx2"]
# The oldest C libraries that a wheel may be built for; those of MLX want the first.
PLATFORMS = ("manylinux_2_35_aarch64", "manylinux_2_28_aarch64", "manylinux2014_aarch64")
# OpenBLAS takes NEON's kernels for this one. For QEMU's default it takes those of SME, which QEMU 7.2 computes wrongly.
PROCESSOR = "neoverse-n1"
# What ONNX Runtime reads to find that processor; it ends in a segmentation fault where another kind's text is there.
CPUINFO = """\
processor\t: {}
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
# Programs for ARM are known by the first bytes of their files; F: QEMU is opened now, outside the system that it runs.
# Kernels before 6.7 have one table for the whole machine, which Debian's package has filled.
MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
INSIDE = r"""
set -e
if mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc 2>/dev/null; then
  printf '%s' "$REGISTRATION" >/proc/sys/fs/binfmt_misc/register
fi
mount -t proc proc "$SYSTEM/proc"
mount --bind "$SYSTEM/cpuinfo" "$SYSTEM/proc/cpuinfo"
mount --rbind /dev "$SYSTEM/dev"
mount -t tmpfs tmpfs "$SYSTEM/tmp"
mount --bind "$PROJECT" "$SYSTEM/project"
mount --bind "$WHEELS" "$SYSTEM/wheels"
exec chroot "$SYSTEM" /usr/bin/env -i -C /project PATH=/usr/bin:/bin HOME=/tmp LANG=C.UTF-8 \
  PYTHONPATH=/project:/wheels QEMU_CPU="$QEMU_CPU" OMP_NUM_THREADS=1 CI=true "$@"
"""
# The quickstart's way with a model of a second.
WAY = r"""
set -e
program="python3 -m mlx_transformer"
cd /tmp
python3 -c 'from mlx_transformer.device import use_fast_blas; print("BLAS:", use_fast_blas())'
for i in $(seq 12); do
  day=$((i % 28 + 1)) year=20$((i + 20))
  echo "May $day, $year" >>en
  echo "$day. Mai $year" >>de
done
cat >recipe.toml <<'END'
[model]
preset = "tiny"
max_positions = 64  # the longest input is tried too
[data]
source = "en"
target = "de"
valid_source = "en"
valid_target = "de"
vocab_size = 270
batch_tokens = 40
[training]
steps = 2
END
$program train recipe.toml --out run
echo 'May 3, 2024' >line
$program translate run --input line --output mlx
for precision in float32 int8; do
  $program export run $precision --target cpu --precision $precision
  $program validate run $precision
done
$program translate float32 --input line --output onnx
test "$(cat mlx)" = "$(cat onnx)"
"""
# What another processor computes otherwise: products, rounding, integers, and the tokens that come of them.
SLICE = [
    "tests/mlx_transformer/nn/test_blas.py",
    "tests/mlx_transformer/nn/test_against_reference.py",
    "tests/mlx_transformer/generation/test_sampling.py",
    "tests/export/nn/test_export.py",
    "tests/export/precision/test_rounding.py",
    "tests/export/precision/test_int8_fixed.py::test_every_target_is_what_the_scales_say",
    "tests/export/runtime/test_runtime.py::test_the_tokens_of_mlx",
    "tests/export/targets/test_cpu_gemm.py",
]


class MissingError(Exception):
    """What this machine lacks, and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="test processes (default: 2)")
    options, arguments = parser.parse_known_args()
    begin = time.monotonic()
    try:
        check_machine()
        make_system()
        install_wheels()
        if in_arm("python3", "-c", "import platform; assert platform.machine() == 'aarch64'"):
            raise MissingError("programs for ARM don't run: apt install qemu-user-static, or a kernel of 6.7 or later")
    except MissingError as error:
        print(f"arm64: {error}", file=sys.stderr)
        return 2
    way = in_arm("sh", "-c", WAY)
    print(f"arm64: train, export, validate, translate: {'failed' if way else 'equal'}, {clock(begin)}", flush=True)
    begin = time.monotonic()
    parallel = ["-n", str(options.workers), "--dist", "load", "-p", "no:cacheprovider"]
    named = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    pytest = ["python3", "-m", "pytest", "-q", *parallel, "-m", "not slow and not consumers"]
    tests = in_arm(*pytest, *([] if named else SLICE), *arguments)
    print(f"arm64: tests: {'failed' if tests else 'passed'}, {clock(begin)}")
    return int(bool(way or tests))


def clock(begin: float) -> str:
    return f"{(time.monotonic() - begin) / 60:.1f} minutes"


def check_machine() -> None:
    if sys.platform != "linux":
        raise MissingError(f"needs Linux with Debian's packages, and this is {platform.system()}")
    if platform.machine() == "aarch64":
        raise MissingError("this machine's processor is an ARM: make test")
    needed = {EMULATOR: "qemu-user-static", "apt-get": "apt", "dpkg-deb": "dpkg", "unshare": "util-linux"}
    if lacking := {program: package for program, package in needed.items() if shutil.which(program) is None}:
        raise MissingError(f"needs {', '.join(lacking)}: apt install {' '.join(lacking.values())}")
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        raise MissingError("the kernel gives this user no namespaces: run it as root, or see user_namespaces(7)")


def make_system() -> None:
    """.arm64/system: the unpacked packages, and the places that `INSIDE` mounts something at."""
    if finished(SYSTEM, mark := " ".join(PACKAGES)):
        return
    print("Unpacking Debian's packages for arm64 into .arm64/system, once: 25 MB to fetch", flush=True)
    place = emptied(SYSTEM)
    fetched = emptied(PLACE / "apt")
    for folder in ("lists/partial", "cache/archives/partial"):
        (fetched / folder).mkdir(parents=True)
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "true",
        "Dir::Cache": fetched / "cache",
        "Dir::Log": fetched,
        "Dir::State": fetched,
        "Dir::State::status": "/dev/null",
    }
    apt = ["apt-get", "-qq", "-y", *(f"-o{name}={value}" for name, value in settings.items())]
    # A list of other sources that has nothing for this processor is no matter: what is missing is missed below.
    subprocess.run([*apt, "update"], capture_output=True)
    done = subprocess.run([*apt, "--download-only", "install", *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        raise MissingError(f"the sources of apt don't give Debian's packages for arm64: {last_line(done.stderr)}")
    for package in sorted((fetched / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, place], check=True)
    for folder in ("proc", "dev", "tmp", "project", "wheels", "sys/devices/system/cpu"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    for name in ("possible", "present"):
        (place / "sys/devices/system/cpu" / name).write_text("0-1\n", encoding="ascii")
    (place / "cpuinfo").write_text("".join(map(CPUINFO.format, range(2))), encoding="ascii")
    shutil.rmtree(fetched)
    finish(SYSTEM, mark)


def install_wheels() -> None:
    """.arm64/wheels: what the project and its tests import, for the system's Python, in constraints.txt's versions.
    They are installed from outside, where pip isn't emulated."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    constraints = ROOT / "constraints.txt"
    version = (SYSTEM / "usr/bin/python3").readlink().name.removeprefix("python")
    mark = sha256("\n".join([version, *wanted, *TOOLS, constraints.read_text(encoding="utf-8")]).encode()).hexdigest()
    if finished(WHEELS, mark):
        return
    print(f"Installing wheels for aarch64 and Python {version} into .arm64/wheels, once: 200 MB to fetch", flush=True)
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--only-binary=:all:", "-c", constraints]
    options += ["--python-version", version, *(f"--platform={name}" for name in PLATFORMS)]
    pip = [sys.executable, "-m", "pip", "install", "--target", emptied(WHEELS), *options, *wanted, *TOOLS]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        raise MissingError(f"the wheels can't be installed: {last_line(done.stderr)}")
    finish(WHEELS, mark)


def in_arm(*command: str) -> int:
    """The exit status of a command in the system, whose /project is this one."""
    variables = {
        "SYSTEM": str(SYSTEM),
        "WHEELS": str(WHEELS),
        "PROJECT": str(ROOT),
        "REGISTRATION": f":{EMULATOR}:M::{MAGIC}:{MASK}:{shutil.which(EMULATOR)}:F",
        "QEMU_CPU": PROCESSOR,
        "PATH": os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin")),
    }
    return subprocess.run([*NAMESPACES, "sh", "-c", INSIDE, "sh", *command], env={**os.environ, **variables}).returncode


def emptied(folder: Path) -> Path:
    """A new folder, in place of one that was begun and not finished, or is out of date."""
    mark_of(folder).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def mark_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.made-of")


def finished(folder: Path, mark: str) -> bool:
    return mark_of(folder).exists() and mark_of(folder).read_text(encoding="utf-8") == mark


def finish(folder: Path, mark: str) -> None:
    mark_of(folder).write_text(mark, encoding="utf-8")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1]


if __name__ == "__main__":
    sys.exit(main())
