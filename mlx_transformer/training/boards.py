"""Where a run's curves go beside metrics.jsonl: TensorBoard, where its writer is installed, and Weights & Biases, where
the recipe names a project of it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_transformer.system.durable import write_text
from mlx_transformer.system.errors import UserError, error_line
from mlx_transformer.system.files import read_text

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
