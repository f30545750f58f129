"""Whether two revisions of the code export the same bytes: BASE, and the working tree as it is. `make graph-bytes`.

Models of many kinds (tests/helpers/covering_exports.py) are written once, as checkpoints, and exported by each revision
in processes of its own, BASE from a temporary git worktree. Every file written is compared byte for byte, and nothing
is left out of it. An option of the network that BASE doesn't know stays as it is by default. What BASE wrote is kept
in build/graph_bytes/REVISION: against the same BASE only the working tree exports again.

python tests/graph_bytes.py BASE [--workers 2]     The status is 1 if a file differs, or a model can't be exported.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from covering_exports import Export, write_exports
from differing_files import differences
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "graph_bytes"
FAILED = ".failed"

# Run with a revision's tree as the current folder; they use nothing but what every revision has.
FIELDS = """
import json, typing, mlx_transformer
hints = typing.get_type_hints(mlx_transformer.TransformerConfig)
literal = lambda hint: typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
print(json.dumps({name: literal(hint) for name, hint in hints.items()}))
"""
EXPORT = """
import json, pathlib, sys, export
assert pathlib.Path(export.__file__).is_relative_to(pathlib.Path.cwd()), export.__file__
for line in sys.stdin:
    job = json.loads(line)
    out = pathlib.Path(job["out"])
    part = out.with_name(out.name + ".part")
    part.mkdir()
    try:
        getattr(export, job["function"])(job["checkpoint"], part / job["file"], **job["options"])
    except Exception as error:
        out.with_name(out.name + ".failed").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    else:
        part.rename(out)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a revision: a commit, a branch or a tag")
    parser.add_argument(
        "--workers", type=int, default=2, choices=range(1, 65), metavar="N", help="processes (default: 2)"
    )
    arguments = parser.parse_args()
    try:
        return compare(_git("rev-parse", "--verify", f"{arguments.base}^{{commit}}"), arguments.workers)
    except subprocess.CalledProcessError as error:  # it has said why
        return error.returncode
    except KeyboardInterrupt:
        return 130


def compare(revision: str, workers: int) -> int:
    base, tree, checkpoints = PLACE / revision, PLACE / "working-tree", PLACE / "checkpoints"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.rmtree(checkpoints, ignore_errors=True)
    with worktree(revision) as folder, Progress() as progress:
        exports = list(progress.track(write_exports(checkpoints, _fields(folder)), description="models"))
        export_all(folder, base, exports, workers, progress, revision[:12])
        export_all(ROOT, tree, exports, workers, progress, "working tree")
    found = [lines for export in exports if (lines := compared(export, base, tree))]
    for lines in found:
        print("\n".join(lines))
    if found:
        print(f"{len(found)} of {len(exports)} models differ: see {base} and {tree}")
    else:
        print(f"all files of {len(exports)} models are equal, by {revision[:12]} and the working tree")
    return 1 if found else 0


def compared(export: Export, base: Path, tree: Path) -> list[str]:
    """A line for each file that differs or revision that refuses, and above them how it was exported; none if equal."""
    failed = [(folder.name, folder / f"{export.name}{FAILED}") for folder in (base, tree)]
    lines = [f"  {name}: {path.read_text(encoding='utf-8')}" for name, path in failed if path.exists()]
    if not lines:
        lines = [f"  {line}" for line in differences(base / export.name, tree / export.name)]
    return lines and [f"{export.name}: {export.function} with {export.options}", *lines]


def export_all(
    code: Path, place: Path, exports: Sequence[Export], workers: int, progress: Progress, title: str
) -> None:
    """PLACE/NAME, or PLACE/NAME.failed with the error, of each export that isn't in `place`, by the code of a tree."""
    place.mkdir(parents=True, exist_ok=True)
    for unfinished in (*place.glob(f"*{FAILED}"), *place.glob("*.part")):
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
    outs = [place / export.name for export in exports]
    jobs = [{**asdict(e), "out": str(out)} for e, out in zip(exports, outs, strict=True) if not out.exists()]
    task = progress.add_task(title, total=len(exports))
    processes = [_start(code, jobs[worker::workers]) for worker in range(workers)]
    try:
        while any(process.poll() is None for process in processes):
            progress.update(task, completed=sum(out.exists() for out in outs))
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    progress.update(task, completed=len(exports))
    if any(process.returncode for process in processes):
        raise SystemExit(f"{title}: an exporting process ended before its last model")


def _start(code: Path, jobs: Sequence[dict[str, Any]]) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as lines:
        lines.writelines(f"{json.dumps(job)}\n" for job in jobs)
        lines.seek(0)
        # In a session of its own Ctrl-C doesn't reach it, which would show as a traceback: `export_all` ends it.
        return subprocess.Popen([sys.executable, "-c", EXPORT], cwd=code, stdin=lines, start_new_session=True)


def _fields(code: Path) -> dict[str, list[Any]]:
    """{field of a config: its values, or none where they aren't named} in the code of a tree."""
    done = subprocess.run([sys.executable, "-c", FIELDS], cwd=code, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """The files of a revision, as long as it is open."""
    with tempfile.TemporaryDirectory(prefix="graph-bytes-") as folder:
        tree = Path(folder) / "base"
        try:
            _git("worktree", "add", "--quiet", "--detach", str(tree), revision)
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
