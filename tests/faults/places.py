"""Every place of every command that writes: killed there, the machine out of power there, the disk full from there on,
one call refused there.

Whatever happens, what was there before is whole or what is new is, an error is one line that names the file, nothing
else is left, and the same command, given again, ends with what it would have written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from commands import Case, Verdict, Writer, call, complaint, contents, copy, part
from injection import GROWING, How, Injection

REMOVALS = ("rename", "remove", "rmdir")


class Places:
    """A command's places, from one undisturbed run, and what it wrote there."""

    def __init__(self, writer: Writer, base: Path, folder: Path):
        self.writer, self.base = writer, base
        place, seen = self._made(folder), folder / "seen.json"

        def prepare():
            injection = Injection(place)
            injection.install()
            return lambda: seen.write_text(json.dumps(injection.seen), encoding="utf-8")

        ended = call(self.command(place), folder / "process", prepare)
        if ended.status:
            raise SystemExit(f"{writer.name}: {ended.status}: {ended.error}")
        self.seen: list[tuple[str, str]] = [(what, name) for what, name in json.loads(seen.read_text(encoding="utf-8"))]
        self.new = contents(place)

    def command(self, place: Path, again: bool = False) -> str:
        begun = (place / self.writer.out / "run.json").exists() or self.writer.name != "train"
        given = self.writer.again if again and self.writer.again and begun else self.writer.command
        return given.format(b=self.base, o=place / self.writer.out)

    def cases(self, how: How) -> list[Case]:
        found = []
        for at, (what, file) in enumerate(self.seen, 1):
            if how != "full" or what in GROWING:
                name = f"{how} at {at} ({what} {file})"
                found.append(Case(self.writer.name, name, partial(self.tried, at=at, how=how, what=what)))
        return found

    def tried(self, folder: Path, at: int, how: How, what: str) -> Verdict:
        place = self._made(folder)
        before = contents(place)

        def prepare() -> None:
            Injection(place, at, how).install()

        ended = call(self.command(place), folder / "process", prepare)
        now, kept = contents(place), how == "refuse" and what in REMOVALS
        killed = how in ("kill", "power")
        if killed:
            fault = "" if ended.status == -9 else f"not killed, but status {ended.status}: {ended.error[-200:]}"
        elif ended.status == 0:
            fault = "" if self.new.items() <= now.items() else f"status 0 without {_difference(self.new, now)}"
        else:
            fault = complaint(ended, self.writer.out)
        fault = fault or self._half(before, now)
        if not killed and not kept:
            fault = fault or self._left(before, now)
        state = "new" if self.new.items() <= now.items() else "old" if before.items() <= now.items() else "parts"
        ended = call(self.command(place, again=True), folder / "process")
        again = contents(place)
        if not fault and ended.status:
            fault = f"cannot be given again: {ended.status}: {ended.error[-300:]}"
        if not fault and (not self.new.items() <= again.items() if kept else again != self.new):
            fault = f"given again it ends with others: {_difference(self.new, again)}"
        return Verdict(state, fault)

    def _made(self, folder: Path) -> Path:
        """The folder that is written to. An old OUT differs from a new one, even of the same command."""
        place = folder / "place"
        place.mkdir()
        if self.writer.old:
            for name in (self.writer.out, *self.writer.beside):
                copy(self.base / f"{self.writer.old}{name.removeprefix(self.writer.out)}", place / name)
            config = place / self.writer.out / "config.json"
            if config.exists():
                config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
        return place

    def _half(self, before: dict[str, str], now: dict[str, str]) -> str:
        """What stands under a final name, and is neither whole."""
        if self.writer.name == "train":  # whose folder grows: its files are judged by those that go on
            return ""
        for name in (self.writer.out, *self.writer.beside):
            found = part(now, (name,))
            if found not in (part(before, (name,)), part(self.new, (name,))):
                return f"{name} is neither the old one nor the new: {_difference(part(self.new, (name,)), found)}"
        return ""

    def _left(self, before: dict[str, str], now: dict[str, str]) -> str:
        """What an error leaves that is no one's. A translation keeps what is done."""
        kept = [f"{self.writer.out}.partial", f"{self.writer.out}.partial.json"] if self.writer.again else []
        left = [name for name in now if name not in {*before, *self.new, *kept}]
        if self.writer.name == "train":  # checkpoints that the whole run drops at its end
            left = [name for name in left if any(folder.startswith(".") for folder in name.split("/"))]
        return f"left: {left[:5]}" if left else ""


def _difference(expected: dict[str, str], found: dict[str, str]) -> str:
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    return ", ".join(
        f"{name} {'missing' if name not in found else 'too many' if name not in expected else 'another'}"
        for name in names[:5]
    )


def all_places(base: Path, folder: Path, writers: Sequence[Writer]) -> list[Places]:
    found = []
    for number, writer in enumerate(writers):
        if (base / (writer.old or "model")).exists():
            place = folder / f"places-{number}"
            place.mkdir()
            found.append(Places(writer, base, place))
    return found
