"""A run's folder: what was asked for, what it ran on, its metrics and its checkpoints.

OUT/run.json              recipe, model config, versions, digests of the data
OUT/metrics.jsonl         one JSON object a line: training, validation, events
OUT/tensorboard/          the same curves, where a TensorBoard writer is installed
OUT/checkpoints/step-N/   checkpoint folders that also hold the optimizer's state; the last ones are kept
OUT/model/                the trained model, a checkpoint folder without optimizer state
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..spec import checkpoint
from ..spec.config import TransformerConfig
from ..spec.errors import UserError
from ..spec.versions import versions

STATE, OPTIMIZER = "training.json", "optimizer.safetensors"
# What may differ between a run and its continuation: how long it goes on and what is reported, not what is computed.
MAY_CHANGE = {"epochs", "steps", "minutes", "log_every", "keep", "checkpoint_seconds", "valid_every", "valid_sentences"}


class Run:
    """Files of one run. Creating one refuses a folder that already holds a run unless `resume`."""

    def __init__(self, folder: Path, record: dict[str, Any], resume: bool, warn: Callable[[str], None]):
        self.folder, self.warn = folder, warn
        existing = folder / "run.json"
        if existing.exists() and not resume:
            raise UserError(f"{folder}: already holds a run; continue it with --resume or choose another --out")
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is a file; --out needs a folder")
        if resume:
            self._check_same(existing, record)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not existing.exists():
                _write(existing, json.dumps({**record, "versions": versions()}, indent=2, ensure_ascii=False) + "\n")
            self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error})") from error
        self._board = _tensorboard(folder / "tensorboard")

    def close(self) -> None:
        self._metrics.close()
        if self._board is not None:
            self._board.close()

    def metric(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl (and numbers to TensorBoard)."""
        self._metrics.write(json.dumps({"kind": kind, "step": step, **values}, ensure_ascii=False) + "\n")
        self._metrics.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def save(
        self,
        config: TransformerConfig,
        weights: Mapping[str, NDArray],
        tokenizer_json: str,
        optimizer: Mapping[str, NDArray],
        state: dict[str, Any],
        keep: int,
    ) -> Path:
        """Write checkpoints/step-N durably, then drop all but the last `keep`."""
        path = self.folder / "checkpoints" / f"step-{state['step']:08d}"
        texts = {STATE: json.dumps(state, indent=2) + "\n"}
        checkpoint.save_checkpoint(path, config, weights, tokenizer_json, texts=texts, tensors={OPTIMIZER: optimizer})
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def checkpoints(self) -> list[Path]:
        """Complete checkpoint folders, oldest first."""
        found = (self.folder / "checkpoints").glob("step-*")
        return sorted(p for p in found if re.fullmatch(r"step-\d+", p.name) and (p / checkpoint.MANIFEST).exists())

    def newest(self) -> tuple[checkpoint.Checkpoint, dict[str, NDArray], dict[str, Any]] | None:
        """(checkpoint, optimizer's arrays, state) of the newest undamaged checkpoint; damaged ones are reported."""
        for path in reversed(self.checkpoints()):
            try:
                opened = checkpoint.open_checkpoint(path)
                state = json.loads((path / STATE).read_text(encoding="utf-8"))
                return opened, checkpoint.read_tensors(path / OPTIMIZER), state
            except (UserError, OSError, ValueError) as error:
                self.warn(f"{path.name} is damaged, trying the one before it ({error})")
        return None

    def _check_same(self, path: Path, record: dict[str, Any]) -> None:
        if not path.exists():
            raise UserError(f"{self.folder}: nothing to resume (no run.json); start it without --resume")
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: damaged ({error}); restore it or start a new run") from error
        old, new = _flat(before), _flat(json.loads(json.dumps(record)))
        names = [n for n in sorted(old.keys() | new.keys()) if not n.startswith("versions.")]
        differences = [
            f"{n} was {old.get(n)!r}, now {new.get(n)!r}"
            for n in names
            if old.get(n) != new.get(n) and n.rsplit(".", 1)[-1] not in MAY_CHANGE
        ]
        if differences:
            raise UserError(f"{self.folder}: cannot resume with another recipe: " + "; ".join(differences))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}.{key}".lstrip(".")).items()}
    return {name: value}


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _tensorboard(folder: Path):
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
