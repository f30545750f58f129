"""One class of inputs: what is copied, damaged and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from attempts import Attempt


@dataclass(frozen=True)
class Class:
    """bases: what is copied before the damage. commands: one of them is run, "{f}" stands for the folder; or a function
    that chooses. told: digests are there, so that no damaged weights may speak."""

    name: str
    bases: tuple[str, ...]
    damage: Callable[[Random, Path], object]
    commands: tuple[str, ...] | Callable[[Random, Path], Attempt]
    weight: int = 10
    told: bool = False

    def attempt(self, random: Random, folder: Path) -> tuple[Attempt, str]:
        """What is run, and in words."""
        if callable(self.commands):
            chosen = self.commands(random, folder)
            shown = getattr(chosen, "__name__", "call") if callable(chosen) else " ".join(chosen)
        else:
            shown = random.choice(self.commands)
            chosen = shown.format(f=folder).split()
        return chosen, shown.replace(str(folder), "{f}").encode("ascii", "backslashreplace").decode()[:150]


def on(path: str, how: Callable[[Random, Path], object], manifest: bool = False) -> Callable[[Random, Path], None]:
    """Damage to one of the files that a pattern finds; without `manifest` nothing is left that would tell."""

    def change(random: Random, folder: Path) -> None:
        if not manifest:
            for file in folder.rglob("manifest.json"):
                file.unlink()
        how(random, random.choice([file for file in sorted(folder.glob(path)) if file.is_file()]))

    return change


def on_weights(random: Random, path: Path) -> None:
    """The same number of bytes, some of them others: what only a digest tells."""
    data = bytearray(path.read_bytes())
    at = random.randrange(len(data) // 2, len(data))
    size = random.choice([1, 4, 64, 1000])
    changed = random.choice([bytes(size), random.randbytes(size), bytes([data[at] ^ 64])])
    data[at : at + size] = changed[: len(data) - at]
    path.write_bytes(data)


def nothing(random: Random, folder: Path) -> None:
    """The numbers are the damage."""


def one_of(*damages: Callable[[Random, Path], object]) -> Callable[[Random, Path], None]:
    """Any of these."""

    def change(random: Random, folder: Path) -> None:
        random.choice(damages)(random, folder)

    return change


def digests(name: str, bases: tuple[str, ...], path: str, commands: tuple[str, ...]) -> Class:
    """Damage that the digests beside the file tell of."""
    return Class(f"digests: {name}", bases, on(path, on_weights, True), commands, 5, True)
