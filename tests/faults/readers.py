"""What reads each small file of a model or a run, so that it can be tried with every length of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from commands import Verdict, copy

STEP = "run/checkpoints/step-00000002"


@dataclass(frozen=True)
class Reader:
    """file: below the folder of `bases.make`. read: what is read of a folder. bare: without manifests, so that nothing
    but the file itself tells. prefix: of lines: what must be read of the first so many bytes."""

    file: str
    read: Callable[[Path], Any]
    bare: bool = False
    prefix: Callable[[bytes], Any] | None = None

    @property
    def of(self) -> str:
        return f"{Path(self.file).parts[0]}{', no manifest' if self.bare else ''}"


def checkpoint(folder: Path) -> Any:
    from mlx_transformer.core.checkpoint import open_checkpoint
    from mlx_transformer.text.tokenizer import checked_tokenizer

    opened = open_checkpoint(folder / "model")
    tensors = {name: array.tobytes() for name, array in opened.tensors()}
    return (
        opened.config,
        json.loads(checked_tokenizer(opened) or "null"),
        tensors,
    )  # without its last newline it is as good


def theirs(folder: Path) -> Any:
    from mlx_transformer.families.folder import read_folder

    found = read_folder(folder / "theirs")
    return found.config, found.generation, {n: np.asarray(x).tobytes() for n, x in found.tensors.items()}


def package(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from export import OnnxTransformer

        return OnnxTransformer(folder / name, threads=1).translate(["one two", "three"], max_new_tokens=4)

    return read


def step(folder: Path) -> Any:
    """The newest checkpoint of a run. A damaged one must be told, and the one before it be taken."""
    from mlx_transformer.system.errors import UserError
    from mlx_transformer.training.run_folder import Run

    complaints: list[str] = []
    run = Run.__new__(Run)
    run.folder, run.warn = folder / "run", complaints.append
    newest = run.newest()
    assert newest is not None
    bad = folder / STEP.replace("step-", "damaged-step-")
    if bad.exists():
        bad.rename(folder / STEP)
        assert complaints
        assert newest[2]["step"] == 1
        raise UserError(complaints[0])
    return newest[2]["step"], newest[2]


def record(folder: Path) -> Any:
    from mlx_transformer.system.files import read_json

    return read_json(folder / "run" / "run.json")


def metrics(folder: Path) -> Any:
    """What is left of the curve after it was read; of a cut one, the lines that are whole."""
    from mlx_transformer.training.run_folder import Run

    run = Run.__new__(Run)
    run.folder = folder / "run"
    run.rewind(1 << 30)
    return (folder / "run" / "metrics.jsonl").read_bytes().splitlines()


def clock(folder: Path) -> Any:
    from mlx_transformer.training.progress import _read_clock

    return _read_clock(folder / "clock.txt")


def of_metrics(begin: bytes) -> Any:
    return [line for line in begin.splitlines() if line.endswith(b"}")]


def of_clock(begin: bytes) -> Any:
    pairs = [line.split() for line in begin[: begin.rfind(b"\n") + 1].splitlines()]
    return {int(done): float(seconds) for done, seconds in pairs}


READERS = (
    *(Reader(f"model/{name}", checkpoint) for name in ("config.json", "manifest.json", "tokenizer.json")),
    Reader("model/model.safetensors", checkpoint),
    *(
        Reader(f"model/{name}", checkpoint, bare=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors")
    ),
    *(Reader(f"theirs/{name}", theirs) for name in ("config.json", "generation_config.json", "model.safetensors")),
    *(Reader(f"{STEP}/{name}", step) for name in ("manifest.json", "training.json", "optimizer.safetensors")),
    Reader("run/run.json", record),
    Reader("run/metrics.jsonl", metrics, prefix=of_metrics),
    Reader("clock.txt", clock, prefix=of_clock),
    *(Reader(f"onnx/{name}", package("onnx")) for name in ("manifest.json", "mlx_transformer.json", "config.json")),
    *(Reader(f"onnx/{name}", package("onnx")) for name in ("tokenizer.json", "onnx/manifest.json")),
    *(Reader(f"onnx/onnx/{name}", package("onnx")) for name in ("encoder_model.onnx", "model.onnx_data")),
    *(Reader(f"onnx/{name}", package("onnx"), bare=True) for name in ("mlx_transformer.json", "config.json")),
    *(Reader(f"onnx/{name}", package("onnx"), bare=True) for name in ("tokenizer.json", "onnx/encoder_model.onnx")),
)


def cut(folder: Path, base: Path, reader: Reader, lengths: list[int]) -> Verdict:
    """Each of these lengths of a file is refused in one line, or read as what it is."""
    from mlx_transformer.system.errors import UserError

    top = Path(reader.file).parts[0]
    copy(base / top, folder / top)
    if reader.bare:
        for manifest in folder.rglob("manifest.json"):
            manifest.unlink()
    whole, path = reader.read(folder), folder / reader.file
    data, accepted = path.read_bytes(), 0
    for length in lengths:
        os.pwrite(2, f"{length:>12}\n".encode(), 0)  # where it was, should it crash
        path.write_bytes(data[:length])
        expected = reader.prefix(data[:length]) if reader.prefix else whole
        try:
            found = reader.read(folder)
        except UserError as error:
            if str(folder) not in str(error):
                return Verdict("refused", f"length {length}: no file is named: {error}")
        except BaseException as error:
            return Verdict("traceback", f"length {length}: {error!r}")
        else:
            accepted += 1
            if found != expected:
                return Verdict("taken for whole", f"length {length}: {str(found)[:200]}")
    return Verdict("read right" if accepted == len(lengths) else "refused", "", len(lengths))
