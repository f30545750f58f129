"""Two processes with the same command, begun at once or shortly after one another, into one new OUT: one of them writes
it, whole, and the other is refused in one line."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from random import Random

from commands import WRITERS, Case, Verdict, Writer, begin, call, complaint, contents, finished
from kills import write_teacher

ROUNDS = 30
IN_ONE = 5
"""Rounds of one case."""
TEXT = "--input {b}/in.txt"
PAIRS = "--source {b}/in.txt --reference {b}/in.txt"
OTHERS = (
    Writer("export --triton", "export {b}/model {o} --triton"),
    Writer("average", "average {b}/run {b}/run --out {o}"),
    Writer("merge", "merge {b}/quantized {b}/of-integers --out {o}"),
    Writer("merge --keep-adapter", "merge {b}/quantized {b}/of-integers --keep-adapter --out {o}"),
    Writer("shortlist", f"shortlist {{b}}/student {{o}} {PAIRS} --first 4", out="out.bin"),
    Writer("report", "report {b}/run --out {o}", out="out.html"),
    Writer("explain", "explain {b}/onnx one --out {o}", out="out.html"),
    Writer("compare", f"compare {{b}}/onnx {{b}}/model {PAIRS} --out {{o}}", out="out.html"),
    Writer("compare --json", f"compare {{b}}/onnx {{b}}/model {PAIRS} --json {{o}} --out {{o}}.html", out="out.json"),
    Writer("embed", f"embed {{b}}/vectors {TEXT} --out {{o}}", out="out.npy"),
    Writer("classify", f"classify {{b}}/classes {TEXT} --out {{o}}", out="out.txt"),
    Writer("tag", f"tag {{b}}/token-classes {TEXT} --out {{o}}", out="out.txt"),
    Writer("rerank", "rerank {b}/ranks --input {b}/pairs.tsv --out {o}", out="out.txt"),
    Writer("web", "web {b}/page --assets {b}/node_modules --out {o}"),
)


def cases(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    from faults import spread

    writers = [writer for writer in (*WRITERS, *OTHERS) if writer.name != "export"]  # which is there as new
    if not (base / "text.onnx").exists():
        writers = [writer for writer in writers if writer.old != "text.onnx"]
    distil = f"{write_teacher(folder)[1]}{{o}}"
    writers.append(Writer("distil", distil, again=distil))
    rounds = ROUNDS if count is None else max(1, count // len(writers))
    found = []
    for number, writer in enumerate(spread(writers, count, seed)):
        place = folder / f"whole-{number}"
        place.mkdir()
        ended = call(_command(writer, base, place), folder / "process")
        if ended.status:
            raise SystemExit(f"{writer.name}: {ended.status}: {ended.error}")
        run = partial(raced, writer=writer, base=base, whole=contents(place), longest=ended.seconds)
        for begun in range(0, rounds, IN_ONE):
            name = f"rounds from {begun}, {seed}"
            several = partial(run, rounds=min(IN_ONE, rounds - begun), seed=f"{seed}:{begun}")
            found.append(Case(writer.name, name, several))
    return found


def _command(writer: Writer, base: Path, place: Path) -> str:
    return writer.command.replace(" --force", "").format(b=base, o=place / writer.out)


def raced(
    folder: Path, writer: Writer, base: Path, whole: dict[str, str], longest: float, rounds: int, seed: str
) -> Verdict:
    """longest: seconds that the command takes."""
    random, refused = Random(seed), ""
    for number in range(rounds):
        place = folder / f"place-{number}"
        place.mkdir()
        children = []
        for name in ("first", "second"):
            children.append(begin(_command(writer, base, place), folder / name))
            time.sleep(random.choice([0, random.uniform(0, longest)]))
        ended = [finished(child) for child in children]
        losers = [each for each in ended if each.status]
        fault = "; ".join(filter(None, (complaint(each, writer.out) for each in losers)))
        if len(losers) != 1 and not (not losers and writer.again == writer.command):  # which goes on with what is there
            fault = fault or f"{2 - len(losers)} of two have written: {[each.error[-200:] for each in ended]}"
        if not fault and losers and (place / f"{writer.out}.partial").exists():
            fault = _resumed(writer, base, place, folder, losers[0].error)
        if not fault and (found := contents(place)) != whole:
            fault = f"not whole: {[name for name in {**whole, **found} if whole.get(name) != found.get(name)]}"
        if fault:
            return Verdict("both" if not losers else "wrong", f"round {number}: {fault}", number + 1)
        refused = losers[0].error if losers else ""
    meanwhile = any(words in refused for words in ("meanwhile", "another process"))
    return Verdict("one, the other refused at its end" if meanwhile else "one, the other refused before", "", rounds)


def _resumed(writer: Writer, base: Path, place: Path, folder: Path, error: str) -> str:
    """What is wrong with the lines that the second keeps, as its error must say: they are finished in its place."""
    if "--resume" not in error:
        return f"keeps lines and doesn't say so: {error!r}"
    ended = call(f"{_command(writer, base, place)} --resume --force", folder / "process")
    if "only an earlier one is ever replaced" in ended.error:  # e.g. a random model has written control characters
        (place / writer.out).rename(folder / "moved away")
        ended = call(f"{_command(writer, base, place)} --resume", folder / "process")
    return complaint(ended) if ended.status else ""
