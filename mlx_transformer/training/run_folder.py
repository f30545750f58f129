"""A run's folder: its record, vocabulary, metrics, checkpoints and model.

OUT/run.json              recipe, model config, versions, digests of the data
OUT/tokenizer.json        the vocabulary, as in every checkpoint of the run (two files for separate vocabularies)
OUT/clock.txt             when each step began, in a run limited by minutes
OUT/metrics.jsonl         one JSON object per line: training, validation, skipped steps, the end
OUT/tensorboard/          the same curves, if tensorboardX is installed
OUT/wandb.txt             the run's id at Weights & Biases, if the recipe names a project
OUT/checkpoints/step-N/   checkpoint folders with the optimizer's state; only the last few are kept
OUT/best/                 the checkpoint of the best validation, if the recipe sets `best`
OUT/model/                the trained model, a checkpoint folder without optimizer state
OUT/adapter/              the adapter that is merged into OUT/model, if an adapter was trained
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
    """Raise UserError if the recipe names a project and the package wandb isn't installed."""
    if project is not None and find_spec("wandb") is None:
        raise UserError("[training] wandb: the package isn't installed; pip install wandb, or leave the key out")


class TensorBoard:
    """Writes TensorBoard files. first_step: earlier curves are dropped from there on."""

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
    """Sends a run's curves to Weights & Biases, always to the same run there; steps already sent stay.

    wandb's environment variables apply, e.g. WANDB_MODE=offline.
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
        except Exception as error:  # wandb's own errors, e.g. no key, no network, an unknown project
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
    """Open TensorBoard, if tensorboardX is installed, and Weights & Biases, if `project` is set."""
    opened: list[Board] = []
    with suppress(ImportError):
        opened.append(TensorBoard(folder, first_step))
    if project is not None:
        opened.append(WeightsAndBiases(folder, project, record))
    return opened


RECORD = "run.json"
MODEL = "model"  # key of the record with the origin of OUT/model's weights
# Keys that may change on --resume: lengths, reports and the paths of files (with the same digests). Nothing else may,
# so that the resumed run computes the same.
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
# These change only the last bits of results, so a difference is a warning and not an error.
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
)  # a run's files and folders apart from run.json
OTHERS = (checkpoint.CONFIG, checkpoint.WEIGHTS)  # mark a checkpoint or export, whose tokenizer a run would overwrite

Newest = tuple[checkpoint.Checkpoint, dict[str, NDArray], dict[str, Any]]


def check_folder(folder: Path, resume: bool, force: bool = False) -> None:
    """Raise UserError if a run can't begin in `folder`; with `resume`, can't go on; with `force`, can't start over.

    Files that don't belong to a run may be there and are not touched.
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
    """The files of a run; the folder is locked against other processes until `close`.

    The constructor writes no files. It raises UserError if the folder already holds a run, or with `resume` if the run
    there has another `record`. `begin` writes the first files; with `force` it first removes the earlier run.
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
        """record: the contents of run.json. project: the Weights & Biases project that gets the curves."""
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
        """Write run.json and `texts` ({file name: text}); with `force` replace an earlier run.

        Call it once the run's inputs are read and checked. Before that, and if this fails, the folder stays as it was.
        """
        record = {RECORD: _as_json(self._record)} if self._before != self._record else {}
        try:
            with taken_away(self.folder, PARTS) if self._force else nullcontext():
                (self.folder / "checkpoints").mkdir(exist_ok=True)
                clear_leftovers(self.folder / "checkpoints", "step-*")
                if self._force:
                    self._open_metrics()  # wandb may fail here, while the earlier run can still be restored
                # A new record is written first, since a vocabulary without a record isn't taken for a run's; the record
                # of an earlier run is replaced last.
                files = {**texts, **record} if self._force else {**record, **texts}
                for name, text in files.items():
                    write_text(self.folder / name, text)
        except OSError as error:
            raise _cannot_begin(self.folder, error) from error
        self._made = []

    def note_model(self, made_of: dict[str, Any]) -> None:
        """Note in run.json which weights OUT/model has, e.g. {"final": "last", "steps": [500]}."""
        write_text(self.folder / RECORD, _as_json({**self._record, MODEL: made_of}))

    def close(self) -> None:
        """Close the files and release the lock."""
        if self._metrics is not None:
            self._metrics.close()
        for board in self._boards:
            board.close()
        if self._lock is not None:
            for place in self._made:  # folders of a run that never began
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
        """Append a line to metrics.jsonl, and the numbers to the boards. Raises UserError if the disk fails.

        kind: "train", "valid", "samples", "skipped" or "end".
        """
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
        """Remove from metrics.jsonl the steps after `step`, which will be computed again, "end" lines, and a last line
        that a kill cut short. Unless `validated`, remove the validation of `step` too."""
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
        """Flush metrics.jsonl, write checkpoints/step-N durably, then delete all but the last `keep` checkpoints.

        extra: further files, as arguments of `save_checkpoint`.
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
        """Delete all but the last `keep` checkpoints."""
        for old in self.checkpoints()[:-keep]:
            remove_folder(old)

    def checkpoints(self) -> list[Path]:
        """List the checkpoint folders, oldest first."""
        folders = (self.folder / "checkpoints").glob("step-*")
        numbers = {int(p.name.removeprefix("step-")): p for p in folders if re.fullmatch(r"step-\d+", p.name)}
        return [numbers[step] for step in sorted(numbers)]

    def newest(self) -> Newest | None:
        """Read (checkpoint, optimizer arrays, state) of the newest undamaged checkpoint; None without checkpoints.

        Damaged checkpoints are reported and renamed damaged-step-N. Raises UserError if all are damaged.
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
            for bad in damaged:  # or they would count among the newest that `prune` keeps
                with suppress(OSError):
                    bad.rename(bad.with_name(f"damaged-{bad.name}"))
            return contents
        if damaged:
            raise UserError(f"{self.folder}: every checkpoint is damaged; restore one from a copy or start a new run")
        return None


class FollowerFolder(Run):
    """A `Run` that reads and writes nothing, for the processes of a group other than rank 0."""

    def __init__(self, folder: Path):
        self.folder = folder

    def begin(self, texts: Mapping[str, str]) -> None: ...

    def note_model(self, made_of: dict[str, Any]) -> None: ...

    def close(self) -> None: ...

    def metric(self, kind: str, step: int, **values: Any) -> None: ...

    def checkpoints(self) -> list[Path]:
        return []


def _locked(folder: Path) -> int | None:
    """Lock the folder. Returns the handle that holds the lock; None if the file system has no locks."""
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
    """Return the run's earlier record if `record` may continue it. Raises UserError if e.g. the recipe differs."""
    before = read_json(folder / RECORD)
    if isinstance(before, dict):
        before.pop(MODEL, None)
    old, new = flat(before), flat(record)
    _check_device(folder, old, new)
    # The recipe first, since other differences mostly follow from it.
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
    """Raise UserError for another kind of device: it cuts batches otherwise, so some text would come twice or never."""
    was, now = old.get("device"), new.get("device")
    if was != now:
        where = "with MLX_TRANSFORMER_DEVICE=cpu" if was == "cpu" else f"on a machine with {was}"
        raise UserError(
            f"{folder}: cannot resume on {now} what was trained on {was}: batches are cut differently there; "
            f"continue it {where}, or start a new run with another --out"
        )


def _as_json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:12]}..."


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested tables: {"a": {"b": 1}, "c": [{"d": 2}]} -> {"a.b": 1, "c.0.d": 2}."""
    if isinstance(value, list | tuple) and all(isinstance(inner, dict) for inner in value):  # tables of one name
        value = {str(i): inner for i, inner in enumerate(value)}
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{name}.{key}".lstrip(".")).items()}
    return {name: value}
