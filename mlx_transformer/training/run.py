"""A run's folder: what was asked for, what it ran on, its metrics and its checkpoints.

OUT/run.json              recipe, model config, versions, digests of the data
OUT/tokenizer.json        the vocabulary, as in every checkpoint of the run (of each language: two files)
OUT/clock.txt             of a run by minutes: when each step began
OUT/metrics.jsonl         one JSON object a line: training, validation, skipped steps
OUT/tensorboard/          the same curves, where a TensorBoard writer is installed
OUT/wandb.txt             the run's name at Weights & Biases, where the recipe names a project
OUT/checkpoints/step-N/   checkpoint folders that also hold the optimizer's state; the last ones are kept
OUT/best/                 the checkpoint of the best validation, where the recipe names a score
OUT/model/                the trained model, a checkpoint folder without optimizer state
OUT/adapter/              the adapter that is merged into it, where one was trained
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from numpy.typing import NDArray

from mlx_transformer.core import checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer_files import NAMES
from mlx_transformer.spec.locks import lock
from mlx_transformer.system.durable import clear_leftovers, flush, remove_folder, taken_away, write_text
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_bytes, read_json
from mlx_transformer.system.machine import versions
from mlx_transformer.system.tensors import read_tensors

from .boards import TENSORBOARD, WANDB_ID, Board, boards
from .record import MODEL, RECORD, as_json, check_same

METRICS = "metrics.jsonl"
LARGEST_LOG = 1 << 30  # bytes
OF_VALIDATION = '{"kind": "valid"', '{"kind": "samples"'
STATE, OPTIMIZER = "training.json", "optimizer.safetensors"
PARTS = (
    *NAMES,
    METRICS,
    TENSORBOARD,
    WANDB_ID,
    "wandb",
    "checkpoints",
    "best",
    "model",
    "adapter",
)  # what a run has beside its record
OTHERS = (checkpoint.CONFIG, checkpoint.WEIGHTS)  # of a checkpoint or an export, whose tokenizer would be replaced

Newest = tuple[checkpoint.Checkpoint, dict[str, NDArray], dict[str, Any]]


def check_folder(folder: Path, resume: bool, force: bool = False) -> None:
    """`UserError` if a run cannot begin (or, with `resume`, go on; or, with `force`, begin anew) in `folder`.

    Files that no run makes may be there: they stay as they are.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; --out needs a folder")
    if resume and force:
        raise UserError("--resume goes on with a run, --force begins it anew: choose one")
    has_record = (folder / RECORD).exists()
    if has_record and not resume and not force:
        raise UserError(
            f"{folder}: already holds a run; continue it with --resume, choose another --out, or --force to replace it"
        )
    if resume and not has_record:
        raise UserError(f"{folder}: nothing to resume (no {RECORD}); start it without --resume")
    if foreign := [name for name in (*OTHERS, *PARTS) if not has_record and _holds(folder / name)]:
        raise UserError(f"{folder}: holds {foreign[0]} of something else than a run; choose another --out")


def _holds(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


class Run:
    """Files of one run, locked against other processes until `close`.

    Creating one refuses a folder that already holds a run, or with `resume` a run of another `record` (as JSON), and
    changes nothing there; `begin` does. With `force` a run that is there is removed then.
    """

    def __init__(
        self,
        folder: Path,
        record: dict[str, Any],
        resume: bool,
        warn: Callable[[str], None],
        force: bool = False,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        project: str | None = None,
    ):
        """`defaults`: what a record of an earlier version means that lacks these keys, such as
        "recipe.training.optimizer". `project`: of Weights & Biases, that gets the curves."""
        check_folder(folder, resume, force)
        self.folder, self.warn, self._force = folder, warn, force
        self._metrics: BinaryIO | None = None
        self._boards: list[Board] = []
        self._project = project
        self._first_step = 0
        self._record = record = json.loads(json.dumps({**record, "versions": versions()}))
        self._before = check_same(folder, record, defaults, warn) if resume else None
        self._made = [place for place in (folder, *folder.parents) if not place.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder)
        except OSError as error:
            raise _cannot_begin(folder, error) from error
        try:
            check_folder(folder, resume, force)  # another process may have trained here meanwhile
        except UserError:
            self.close()
            raise

    def begin(self, texts: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write the record and `texts`, by their files' names, and with `force` remove what there is of an earlier run.

        Comes when all that the run reads is read and checked: until then, and where this fails, the folder is as it
        was.
        """
        record = {RECORD: as_json(self._record)} if self._before != self._record else {}
        try:
            with taken_away(self.folder, PARTS) if self._force else nullcontext():
                (self.folder / "checkpoints").mkdir(exist_ok=True)
                clear_leftovers(self.folder / "checkpoints", "step-*")
                if self._force:
                    self._open_metrics()  # the boards may refuse while the earlier run can still be put back
                # Without a record a vocabulary belongs to something else; an earlier record is replaced last.
                files = {**texts, **record} if self._force else {**record, **texts}
                for name, text in files.items():
                    write_text(self.folder / name, text)
        except OSError as error:
            raise _cannot_begin(self.folder, error) from error
        self._made = []

    def note_model(self, said: dict[str, Any]) -> None:
        """Say in the record which weights OUT/model has."""
        write_text(self.folder / RECORD, as_json({**self._record, MODEL: said}))

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        for board in self._boards:
            board.close()
        if self._lock is not None:
            for place in self._made:  # for a run that hasn't begun
                with suppress(OSError):
                    place.rmdir()
            os.close(self._lock)
        self._metrics = self._lock = None
        self._boards, self._made = [], []

    def _open_metrics(self) -> BinaryIO:
        if self._metrics is None:
            self._metrics = (self.folder / METRICS).open("ab", buffering=0)
            self._boards = boards(self.folder, self._first_step, self._project, self._record)
        return self._metrics

    def metric(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl (and numbers to the boards); `UserError` when the disk refuses."""
        path = self.folder / METRICS
        try:
            line = json.dumps({"kind": kind, "step": step, **values}, ensure_ascii=False) + "\n"
            self._open_metrics().write(line.encode())
        except OSError as error:
            raise _refused(path, error) from error
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for board in self._boards if numbers else ():
            board.add(kind, step, numbers)

    def rewind(self, step: int, validated: bool = True) -> None:
        """Forget metrics after `step`, which will be computed again, and a last line that a kill cut short; unless
        `validated`, the validation of `step` too."""
        self._first_step = step + 1
        path = self.folder / METRICS
        if not path.exists():
            return
        lines = read_bytes(path, LARGEST_LOG).decode(errors="replace").split("\n")
        earlier = [line for line in lines if (number := _step_of(line)) is not None and number <= step]
        if not validated:
            earlier = [line for line in earlier if not (line.startswith(OF_VALIDATION) and _step_of(line) == step)]
        write_text(path, "".join(line + "\n" for line in earlier))

    def save(
        self,
        config: TransformerConfig,
        weights: Mapping[str, NDArray],
        tokenizer_json: str,
        optimizer: Mapping[str, NDArray],
        state: dict[str, Any],
        keep: int,
        beside: tuple[Mapping[str, str], Mapping[str, Mapping[str, NDArray]]] = ({}, {}),
    ) -> Path:
        """Write checkpoints/step-N durably, and before it the curve up to there; then drop all but the last `keep`.
        `beside`: further texts and arrays in it, by their files' names."""
        log = self.folder / METRICS
        try:
            if log.exists():
                flush(log)
        except OSError as error:
            raise _refused(log, error) from error
        path = self.folder / "checkpoints" / f"step-{state['step']:08d}"
        texts = {STATE: json.dumps(state, indent=2) + "\n", **beside[0]}
        tensors = {OPTIMIZER: optimizer, **beside[1]}
        checkpoint.save_checkpoint(path, config, weights, tokenizer_json, texts=texts, tensors=tensors)
        self.prune(keep)
        return path

    def prune(self, keep: int) -> None:
        """Drop all but the last `keep` checkpoints."""
        for old in self.checkpoints()[:-keep]:
            remove_folder(old)

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        folders = (self.folder / "checkpoints").glob("step-*")
        numbers = {int(p.name.removeprefix("step-")): p for p in folders if re.fullmatch(r"step-\d+", p.name)}
        return [numbers[step] for step in sorted(numbers)]

    def newest(self) -> Newest | None:
        """(checkpoint, optimizer's arrays, state) of the newest undamaged checkpoint; None if there is none at all.

        Damaged ones are reported and renamed damaged-step-N. `UserError` if all are damaged.
        """
        damaged: list[Path] = []
        for path in reversed(self.checkpoints()):
            try:
                if not (path / checkpoint.MANIFEST).exists():
                    raise UserError(f"{path / checkpoint.MANIFEST} is missing")
                opened = checkpoint.open_checkpoint(path)
                contents = opened, read_tensors(path / OPTIMIZER), read_json(path / STATE)
            except (UserError, OSError) as error:
                self.warn(f"{path.name} is damaged, trying the one before it ({error})")
                damaged.append(path)
                continue
            for bad in damaged:  # else it would count as the newest again when old ones are dropped
                with suppress(OSError):
                    bad.rename(bad.with_name(f"damaged-{bad.name}"))
            return contents
        if damaged:
            raise UserError(f"{self.folder}: every checkpoint is damaged; restore one from a copy or start a new run")
        return None


def _locked(folder: Path) -> int | None:
    """A handle that holds the folder's lock; None on a file system without locks."""
    handle = os.open(folder, os.O_RDONLY)
    if held := lock(handle):
        return handle
    os.close(handle)
    if held is None:
        return None
    raise UserError(f"{folder}: another process is training in this folder; wait for it or stop it")


def _cannot_begin(folder: Path, error: OSError) -> UserError:
    return UserError(f"{folder}: cannot be written ({error}); choose another --out")


def _step_of(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _refused(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: could not be written ({error}); fix that and continue with --resume")
