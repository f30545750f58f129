"""Two translations to one file: the first has it, the second is refused."""

from __future__ import annotations

import pytest
from upper_case import UpperCase

from mlx_transformer.generation import line_files
from mlx_transformer.generation.files import translate_stream
from mlx_transformer.system import durable as locks
from mlx_transformer.system.durable import lock
from mlx_transformer.system.errors import UserError

TEXT = "".join(f"{word}\n" for word in "one two three four five six one two three four".split())


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_one_output_has_one_writer(tmp_path, monkeypatch):
    """A second one is refused in a line, whether the first goes on or not, and what is left is the first one's."""
    monkeypatch.setattr(line_files, "PART_LINES", 3)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(TEXT)
    (tmp_path / "link").symlink_to(target)
    busy = r"(out|link)\.partial: another process is writing it; wait for it, or choose another output"
    refused = []

    def search(rows, **options):
        for place, resume in ((target, False), (target, True), (tmp_path / "link", False)):
            with pytest.raises(UserError, match=busy):
                translate_stream(UpperCase(), source, place, resume=resume)
            refused.append(place)
        return UpperCase().search(rows, **options)

    first = UpperCase()
    first.search = search
    translate_stream(first, source, target)
    assert len(refused) >= 9
    assert target.read_text(encoding="utf-8") == TEXT.upper()
    assert names(tmp_path) == {"in", "out", "link"}


def test_who_opened_what_the_first_has_just_finished_begins_anew(tmp_path, monkeypatch):
    """Between opening the unfinished file and locking it, that one took its name: nobody writes to it any more."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("one\n")
    (tmp_path / "out.partial").write_bytes(b"the first one's text")
    asked = []

    def late(handle: int) -> bool | None:
        asked.append(handle)
        if len(asked) == 1:
            (tmp_path / "out.partial").rename(tmp_path / "kept")
        return lock(handle)

    monkeypatch.setattr(locks, "lock", late)
    translate_stream(UpperCase(), source, target)
    assert (tmp_path / "kept").read_bytes() == b"the first one's text"
    assert target.read_text(encoding="utf-8") == "ONE\n"
    assert names(tmp_path) == {"in", "out", "kept"}
