"""Where a run's curves go beside metrics.jsonl: TensorBoard, where its writer is installed, and Weights & Biases, where
the recipe names a project of it.

A run's folder: what was asked for, what it ran on, its metrics and its checkpoints.

OUT/run.json              recipe, model config, versions, digests of the data
OUT/tokenizer.json        the vocabulary, as in every checkpoint of the run (two files for one of each language)
OUT/clock.txt             when each step began, in a run by minutes
OUT/metrics.jsonl         one JSON object a line: training, validation, skipped steps, the end
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
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from numpy.typing import NDArray

from mlx_transformer.core import checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.outputs import check_outside, claim
from mlx_transformer.core.tokenizer_files import NAMES
from mlx_transformer.system.durable import clear_leftovers, flush, lock, remove_folder, taken_away, write_text
from mlx_transformer.system.errors import UserError, error_line, first_of
from mlx_transformer.system.files import read_bytes, read_json, read_text
from mlx_transformer.system.machine import versions
from mlx_transformer.system.manifest import MANIFEST
from mlx_transformer.system.tensors import read_tensors

TENSORBOARD, WANDB_ID = "tensorboard", "wandb.txt"


def check_wandb(project: str | None) -> None:
    """Raise `UserError` if a project is named and the package isn't there."""
    if project is not None and find_spec("wandb") is None:
        raise UserError("[training] wandb: the package isn't installed; pip install wandb, or leave the key out")


class TensorBoard:
    """Writes TensorBoard's files; curves from `first_step` on that are there already will be written again."""

    def __init__(self, folder: Path, first_step: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=first_step or None)

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        with suppress(OSError):  # a full disk has been reported by then
            self._writer.close()


class WeightsAndBiases:
    """Sends a run's curves to one run there, however often it is resumed; steps that are there already stay.

    Its own variables say where it sends them, or that it doesn't (WANDB_MODE=offline).
    """

    def __init__(self, folder: Path, project: str, record: Mapping[str, Any]):
        wandb: Any = import_module("wandb")
        name = folder / WANDB_ID
        if not name.exists():
            write_text(name, uuid.uuid4().hex + "\n")
        id = read_text(name).strip()
        try:
            self._run = wandb.init(
                project=project, id=id, resume="allow", dir=str(folder), name=folder.name, config=dict(record)
            )
        except Exception as error:  # its own kinds: no key, no network, a project that isn't there
            message = error_line(error).rstrip(".")
            raise UserError(
                f"[training] wandb = {project!r}: {message}; WANDB_MODE=offline needs no network"
            ) from error

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


Board = TensorBoard | WeightsAndBiases


def boards(folder: Path, first_step: int, project: str | None, record: Mapping[str, Any]) -> list[Board]:
    """Open the boards that a run's curves go to."""
    opened: list[Board] = []
    with suppress(ImportError):
        opened.append(TensorBoard(folder, first_step))
    if project is not None:
        opened.append(WeightsAndBiases(folder, project, record))
    return opened


RECORD = "run.json"
MODEL = "model"  # the record's key that says what the trained model was made of
# These may differ between a run and its continuation: how long it goes on, what is reported, where the files are (their
# digests may not differ); nothing that is computed.
MAY_CHANGE = {
    f"recipe.training.{name}"
    for name in (
        "epochs steps minutes log_every keep checkpoint_seconds checkpoint_steps valid_every valid_sentences "
        "patience final average"
    ).split()
} | {
    f"recipe.data.{name}"
    for name in (
        "source target pairs valid_source valid_target valid_pairs text valid_text cache "
        "corpora.source corpora.target corpora.pairs"
    ).split()
}
NUMBER = re.compile(r"(?<=\.corpora)\.\d+")
# Differences that only change the last bits of results: there is a warning, and no refusal.
ENVIRONMENT = {"blas", "versions.mlx"}
METRICS = "metrics.jsonl"
MAX_LOG_BYTES = 1 << 30
VALIDATION_LINES = '{"kind": "valid"', '{"kind": "samples"'
END_LINE = '{"kind": "end"'
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
OTHERS = (checkpoint.CONFIG, checkpoint.WEIGHTS)  # files of a checkpoint or export, whose tokenizer would be replaced

Newest = tuple[checkpoint.Checkpoint, dict[str, NDArray], dict[str, Any]]


def check_folder(folder: Path, resume: bool, force: bool = False) -> None:
    """Raise `UserError` if a run can't begin (or, with `resume`, go on; or, with `force`, begin anew) in `folder`.

    Files that no run makes may be there: they stay as they are.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; --out needs a folder")
    if resume and force:
        raise UserError("--resume goes on with a run, --force begins it anew: choose one")
    has_record = (folder / RECORD).exists()
    if not has_record:
        check_outside(folder)
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
        project: str | None = None,
    ):
        """Begin the run's files, or go on with them.

        `project`: the one of Weights & Biases that gets the curves.
        """
        check_folder(folder, resume, force)
        self.folder, self.warn, self._force = folder, warn, force
        self._metrics: BinaryIO | None = None
        self._boards: list[Board] = []
        self._project = project
        self._first_step = 0
        self._record = record = json.loads(json.dumps({**record, "versions": versions()}))
        self._before = check_same(folder, record, warn) if resume else None
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
        """Write the record and `texts`, by their files' names, and with `force` remove an earlier run.

        It comes when all that the run reads is read and checked: until then, and if this fails, the folder stays as it
        was.
        """
        record = {RECORD: _as_json(self._record)} if self._before != self._record else {}
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

    def note_model(self, made_of: dict[str, Any]) -> None:
        """Say in the record which weights OUT/model has."""
        write_text(self.folder / RECORD, _as_json({**self._record, MODEL: made_of}))

    def close(self) -> None:
        """Close the files and drop the lock."""
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
        """Forget metrics after `step`, which will be computed again, how long the run took so far, and a last line
        that a kill cut short; unless `validated`, the validation of `step` too."""
        self._first_step = step + 1
        path = self.folder / METRICS
        if not path.exists():
            return
        lines = read_bytes(path, MAX_LOG_BYTES).decode(errors="replace").split("\n")
        earlier = [line for line in lines if (number := _step_of(line)) is not None and number <= step]
        earlier = [line for line in earlier if not line.startswith(END_LINE)]
        if not validated:
            earlier = [line for line in earlier if not (line.startswith(VALIDATION_LINES) and _step_of(line) == step)]
        write_text(path, "".join(line + "\n" for line in earlier))

    def save(
        self,
        config: TransformerConfig,
        weights: Mapping[str, NDArray],
        tokenizer_json: str,
        optimizer: Mapping[str, NDArray],
        state: dict[str, Any],
        keep: int,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> Path:
        """Write checkpoints/step-N durably, and before it the curve up to there; then drop all but the last `keep`.

        `extra`: its further files, as arguments of `save_checkpoint`.
        """
        log = self.folder / METRICS
        try:
            if log.exists():
                flush(log)
        except OSError as error:
            raise _refused(log, error) from error
        path = self.folder / "checkpoints" / f"step-{state['step']:08d}"
        texts = {STATE: json.dumps(state, indent=2) + "\n", **extra.get("texts", {})}
        tensors = {OPTIMIZER: optimizer, **extra.get("tensors", {})}
        files = {**extra, "texts": texts, "tensors": tensors}
        output = claim(path, checkpoint.CHECKPOINT, True, own=True)
        checkpoint.save_checkpoint(output, config, weights, tokenizer_json, **files)
        self.prune(keep)
        return path

    def prune(self, keep: int) -> None:
        """Drop all but the last `keep` checkpoints."""
        for old in self.checkpoints()[:-keep]:
            remove_folder(old)

    def checkpoints(self) -> list[Path]:
        """List the checkpoint folders, oldest first."""
        folders = (self.folder / "checkpoints").glob("step-*")
        numbers = {int(p.name.removeprefix("step-")): p for p in folders if re.fullmatch(r"step-\d+", p.name)}
        return [numbers[step] for step in sorted(numbers)]

    def newest(self) -> Newest | None:
        """Read (checkpoint, optimizer's arrays, state) of the newest undamaged checkpoint; None if there is none.

        Damaged ones are reported and renamed damaged-step-N. `UserError` if all are damaged.
        """
        damaged: list[Path] = []
        for path in reversed(self.checkpoints()):
            try:
                if not (path / MANIFEST).exists():
                    raise UserError(f"{path / MANIFEST} is missing")
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


class FollowerFolder(Run):
    """The run's folder for a process that doesn't lead: nothing is read, and nothing written."""

    def __init__(self, folder: Path):
        self.folder = folder

    def begin(self, texts: Mapping[str, str]) -> None: ...

    def note_model(self, made_of: dict[str, Any]) -> None: ...

    def close(self) -> None: ...

    def metric(self, kind: str, step: int, **values: Any) -> None: ...

    def checkpoints(self) -> list[Path]:
        return []


def _locked(folder: Path) -> int | None:
    """Lock the folder and return the handle that holds the lock; None on a file system without locks."""
    handle = os.open(folder, os.O_RDONLY)
    if is_locked := lock(handle):
        return handle
    os.close(handle)
    if is_locked is None:
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


def check_same(folder: Path, record: dict[str, Any], warn: Callable[[str], None]) -> Any:
    """Return the record of the run so far, if `record` continues it; else raise `UserError`."""
    before = read_json(folder / RECORD)
    if isinstance(before, dict):
        before.pop(MODEL, None)
    old, new = flat(before), flat(record)
    _check_device(folder, old, new)
    # The recipe first: the rest mostly follows from it.
    names = sorted(old.keys() | new.keys(), key=lambda name: (not name.startswith("recipe."), name))
    changes = {
        name: f"{name} was {_short(old.get(name))}, now {_short(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    }
    for name in ENVIRONMENT & changes.keys():
        warn(f"{changes[name]}: the run goes on, not bit by bit as it would have")
    refused = [
        text
        for name, text in changes.items()
        if NUMBER.sub("", name) not in MAY_CHANGE | ENVIRONMENT and not name.startswith("versions.")
    ]
    if refused:
        raise UserError(
            f"{folder}: cannot resume with another recipe: {first_of(refused)} (--resume alone takes the run's own)"
        )
    return before


def _check_device(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse another kind of device: batches are cut otherwise there, and text would come twice or never."""
    was, now = old.get("device"), new.get("device")
    if was != now:
        where = "with MLX_TRANSFORMER_DEVICE=cpu" if was == "cpu" else f"on a machine with {was}"
        raise UserError(
            f"{folder}: cannot resume on {now} what was trained on {was}: batches are cut otherwise there; "
            f"continue it {where}, or start a new run with another --out"
        )


def _as_json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:12]}..."


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested tables as one, whose names are joined by dots; tables in a list are named by their numbers."""
    if isinstance(value, list | tuple) and all(isinstance(inner, dict) for inner in value):  # tables of one name
        value = {str(i): inner for i, inner in enumerate(value)}
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{name}.{key}".lstrip(".")).items()}
    return {name: value}
