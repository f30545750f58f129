"""Measuring: engines take turns cell by cell and round by round, each alone on the machine."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

from . import Rows
from .process import EngineError, Worker

TAUGHT = (16, 2)  # teacher-forced agreement: of so many sentences, every so many positions


@dataclass(frozen=True)
class Cell:
    batch: int
    beam: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """b8 or b8x4. Raises ValueError."""
        found = re.fullmatch(r"b([1-9]\d*)(?:x([1-9]\d*))?", text)
        if not found:
            raise ValueError(f"cell {text!r}: expected b8 for batches of 8, or b8x4 for 4 beams")
        return cls(int(found[1]), int(found[2] or 1))

    def __str__(self) -> str:
        return f"b{self.batch}" + (f" beam {self.beam}" if self.beam > 1 else "")


@dataclass
class Task:
    """Sentences to translate, sources with eos. length: tokens of each output, None where the model ends them."""

    sources: Rows
    length: int | None
    sentences: dict[int, int]
    """How many of the sources a cell of that batch size translates."""

    def chosen(self, cell: Cell) -> list[int]:
        """Which of the sources the cell translates, evenly spread."""
        count = min(len(self.sources), self.sentences.get(cell.batch, len(self.sources)))
        return [i * len(self.sources) // count for i in range(count)]

    def batches(self, cell: Cell) -> list[Rows]:
        rows = [self.sources[i] for i in self.chosen(cell)]
        return [rows[i : i + cell.batch] for i in range(0, len(rows), cell.batch)]

    def tokens(self, outputs: Rows) -> int:
        """Decoder steps that the outputs stand for: an eos that the model wrote is one."""
        return sum(len(output) + (0 if self.length else 1) for output in outputs)


@dataclass
class Measured:
    """What one engine did: seconds a round, outputs of the last round."""

    load: float
    resident: int
    seconds: dict[Cell, list[float]] = field(default_factory=dict)
    outputs: dict[Cell, Rows] = field(default_factory=dict)
    first: float = 0.0
    """Median seconds to the first token of a single sentence."""
    peak: int = 0
    taught: float | None = None
    """Share of positions at which, forced to the reference's tokens so far, it prefers the reference's next one."""


def measure(
    workers: dict[str, Worker], task: Task, cells: list[Cell], rounds: int
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Results, and the reasons why engines that stopped working have none."""
    found = {name: Measured(worker.loaded["load"], worker.loaded["resident"]) for name, worker in workers.items()}
    failed: dict[str, str] = {}
    for turn in range(rounds):
        for cell in cells:
            batches = task.batches(cell)
            for name, worker in workers.items():
                if name in failed:
                    continue
                try:
                    seconds, outputs = worker.translate(batches, cell.beam, task.length, timed=True, warm=turn == 0)
                except EngineError as error:
                    failed[name] = f"{cell}: {error}"
                    continue
                if task.length and any(len(output) != task.length for output in outputs):
                    failed[name] = f"{cell}: outputs of {sorted(set(map(len, outputs)))} tokens, not {task.length}"
                found[name].seconds.setdefault(cell, []).append(seconds)
                found[name].outputs[cell] = outputs
            print(f"round {turn + 1} of {rounds}, {cell}", file=sys.stderr)
    found = {name: result for name, result in found.items() if name not in failed}
    for name, result in found.items():
        result.peak = workers[name].peak()
        singles = [[source] for source in task.sources[:9]]
        times = sorted(workers[name].translate([single], 1, 1, warm=i == 0)[0] for i, single in enumerate(singles))
        result.first = times[len(times) // 2]
    return found, failed


def teach(workers: dict[str, Worker], reference: str, names: list[str], task: Task) -> dict[str, float]:
    """Teacher-forced top-1 agreement with the reference's greedy outputs; engines that can't force tokens have none."""
    rows, stride = task.sources[: TAUGHT[0]], TAUGHT[1]
    assert task.length
    _, wanted = workers[reference].translate([rows], 1, task.length)
    shares = {}
    for name in names:
        equal = total = 0
        try:
            for position in range(0, task.length, stride):
                prefix = [output[:position] for output in wanted]
                _, outputs = workers[name].translate([rows], 1, position + 1, prefix=prefix)
                pairs = list(zip(outputs, wanted, strict=True))
                equal += sum(output[position] == target[position] for output, target in pairs)
                total += len(pairs)
        except EngineError as error:
            print(f"{name}: no teacher-forced agreement: {error}", file=sys.stderr)
            continue
        shares[name] = equal / total
    return shares
