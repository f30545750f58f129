"""Every output of every command that writes, set to what the command reads: to each file of it, each folder, a link to
either, a new name in it and the folder around it. All of them are refused in one line, with --force and without, and
nothing changes on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from commands import Case, Verdict, call, complaint, copy
from outputs import OUTPUTS, READ, REASONS, command_line, parameters, paths

TEXTS = set("source reference input calibrate gate_source gate_reference pairs similarity labelled".split())
TEXTS |= {"valid_source", "valid_target"}
RUNS = ("runs", "checkpoints")
MODELS = {"import": "theirs", "to-marian": "student", "shortlist": "student", "embed": "vectors", "classify": "classes"}
MODELS |= {"tag": "token-classes", "answer": "spans", "rerank": "ranks", "fill": "encoder", "web": "page"}
MODELS |= {"explain": "onnx", "claims": "onnx"}
OTHERS = {
    "onnx": "onnx",
    "original": "theirs",
    "assets": "node_modules/onnxruntime-web",
    "adapter": "adapted",
    "b": "onnx",
}
OTHERS["shortlist"] = "shortlist.bin"
MODELS_OF = {"shortlist": "student", "similarity": "vectors", "labelled": "classes"}
"""Models that read such an input."""
TOGETHER = {"valid_source": "valid_target", "valid_target": "valid_source"}
TOGETHER |= {"gate_source": "gate_reference", "gate_reference": "gate_source"}
BY_RECIPE = {"train": {"source": "0.source", "target": "0.target", "start_from": "model"}}
"""What `train` reads is named in its recipe, whose values aren't paths to the parser."""
KEEPS = ("train", "distil")
"""They write into a folder with other files in it, and leave those as they are."""


def cases(base: Path, folder: Path, count: int | None, seed: int) -> list[Case]:
    from faults import spread

    pairs = f"--source {base}/in.txt --reference {base}/in.txt"
    ended = call(f"shortlist {base}/student {base}/shortlist.bin {pairs} --first 4", folder / "process")
    if ended.status:
        raise SystemExit(f"shortlist: {ended.error}")
    found = []
    for command, output in OUTPUTS:
        inputs = [name for name in paths(command) if name in READ] + list(BY_RECIPE.get(command, ()))
        for name in inputs:
            for target in _targets(base / _kind(command, name), keeps=command in KEEPS):
                run = partial(tried, base=base, command=command, output=output, read=name, target=target)
                found.append(Case(f"{command} {output}", f"{name}: {target}", run))
    return spread(found, count, seed)


def _kind(command: str, name: str) -> str:
    """What a parameter is set to, of the folder of `bases.make`."""
    if kind := BY_RECIPE.get(command, {}).get(name):
        return kind
    if name in TEXTS:
        return "pairs.tsv" if name in ("pairs", "similarity", "labelled") else "in.txt"
    return "run" if name in RUNS else OTHERS.get(name, MODELS.get(command, "model"))


def _targets(read: Path, keeps: bool) -> Iterator[str]:
    """Below the folder in which "read" is what is read; "link to" and "hard link to" are made beside it."""
    files = ["read"]
    if read.is_dir():
        files = sorted(str("read" / path.relative_to(read)) for path in read.rglob("*") if path.is_file())
        folders = ["read", *sorted(str("read" / path.relative_to(read)) for path in read.rglob("*") if path.is_dir())]
        for name in folders:
            yield from (name, f"link to {name}", f"{name}/new")
    for name in files:
        yield from (name, f"link to {name}", f"hard link to {name}")
    if not keeps:
        yield "."


def tried(folder: Path, base: Path, command: str, output: str, read: str, target: str) -> Verdict:
    place = folder / "place"
    place.mkdir()
    copy(base / _kind(command, read), place / "read")
    if target.startswith("link to "):
        (place / "link").symlink_to(place / target.removeprefix("link to "))
        out = place / "link"
    elif target.startswith("hard link to "):
        os.link(place / target.removeprefix("hard link to "), place / "link")
        out = place / "link"
    else:
        out = place / target
    model = MODELS_OF.get(read, MODELS.get(command, "model")) if command != "web" else "page"
    places = {"text": base / "in.txt", "run": base / "run", "model": base / model}
    given: dict[str, list[Any]] = {output: [out], read: [place / "read"]}
    if read in TOGETHER:
        given[TOGETHER[read]] = [base / "in.txt"]
    for name, each in parameters(command).items():
        if name in OTHERS and each.required and name not in given:
            given[name] = [base / OTHERS[name]]
        elif name in BY_RECIPE.get(command, {}) and name in ("source", "target") and name not in given:
            given[name] = [base / BY_RECIPE[command][name]]
    if read == "checkpoints":
        given[read].append(base / "run")
    arguments = [str(each) for each in command_line(command, given, places)]
    before, ended = state(place), "refused"
    for force in [[], ["--force"]] if "force" in parameters(command) else [[]]:
        done = call([*arguments, *force], folder / "process")
        if fault := complaint(done):
            return Verdict("not refused", f"{' '.join([*arguments, *force])}: {fault}", 2)
        if state(place) != before:
            return Verdict("changed", f"{' '.join([*arguments, *force])}: {done.error}", 2)
        if not any(reason in done.error for reason in REASONS):
            ended = f"refused: {done.error.strip().replace(str(folder), '')[-60:]}"
    return Verdict(ended, "", 2)


def state(place: Path) -> dict[str, str]:
    """What is below a folder: digests of files, and where links lead."""
    return {str(path.relative_to(place)): _state(path) for path in sorted(place.rglob("*"))}


def _state(path: Path) -> str:
    if path.is_symlink():
        return os.readlink(path)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
