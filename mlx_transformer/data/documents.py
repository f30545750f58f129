"""Plain text to learn a language from: documents, each by itself, from files, folders or patterns of file names.

A file is a document a line, or as a whole (`documents`). A `.jsonl` file has an object a line: {"text": ...}, or
{"prompt": ..., "completion": ...}, of which only the completion is learned.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import read_bytes, without_mark
from mlx_transformer.system.machine import check_memory

from .corpus import split_lines

Cut = Literal["line", "file"]
LARGEST = 1 << 34  # bytes of one file


@dataclass(frozen=True)
class Documents:
    """`prompts[i]`, mostly empty, is read before `texts[i]` and not learned. `digests`: SHA-256, for the record."""

    texts: list[str]
    prompts: list[str]
    digests: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.digests:
            digest = hashlib.sha256()
            for part in (*self.prompts, *self.texts):
                digest.update(part.encode(errors="surrogatepass") + b"\0")
            self.digests["text"] = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lines(self) -> Iterator[str]:
        """All text that a vocabulary is made of."""
        yield from (prompt for prompt in self.prompts if prompt)
        yield from self.texts

    def select(self, indices: Sequence[int]) -> Documents:
        return Documents([self.texts[i] for i in indices], [self.prompts[i] for i in indices])


def read_documents(where: str, documents: Cut | None = None) -> tuple[Documents, int]:
    """(documents, how many empty ones were left out) of a file, a folder (all files below it), or a pattern such as
    "src/**/*.py".

    `documents`: what one is; None: a line of a single file, or one of several files as a whole. `UserError` names a
    file that is missing, not UTF-8 or not JSON lines, and what has no text at all.
    """
    files = list(_files(where))
    is_single = len(files) == 1 and str(files[0]) == where
    cut = documents or ("line" if is_single else "file")
    found: list[tuple[str, str]] = []
    size = 0
    for path in files:
        data = read_bytes(path, LARGEST)
        size += len(data)
        check_memory(3 * size, f"{where}: its text", "give less")
        found += _jsonl(path, data) if path.suffix == ".jsonl" else [("", text) for text in _plain(path, data, cut)]
    kept = [(prompt, text) for prompt, text in found if text.strip()]
    if not kept:
        raise UserError(f"{where}: holds no text; give files with text in them")
    return Documents([text for _, text in kept], [prompt for prompt, _ in kept]), len(found) - len(kept)


def _files(where: str) -> Iterator[Path]:
    path = Path(where)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.parts))
    elif path.exists() or not glob.has_magic(where):
        files = [path]
    else:
        files = sorted(Path(name) for name in glob.glob(where, recursive=True) if Path(name).is_file())
    if not files:
        raise UserError(f"{where}: no file is there; give a file, a folder or a pattern such as 'src/**/*.py'")
    yield from files


def _plain(path: Path, data: bytes, cut: Cut) -> Iterator[str]:
    data = without_mark(data, str(path))
    for number, part in enumerate(split_lines(data) if cut == "line" else [data], start=1):
        yield _decoded(path, number, part)


def _decoded(path: Path, number: int, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = number + data[: error.start].count(b"\n")
        raise UserError(
            f"{path}, line {line}: not UTF-8 (0x{data[error.start]:02x}); convert the file, for example with iconv -t "
            "UTF-8, or name other files"
        ) from None


def _jsonl(path: Path, data: bytes) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(split_lines(without_mark(data, str(path))), start=1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(_decoded(path, number, line))
        except (ValueError, RecursionError):
            raise UserError(f"{path}, line {number}: not JSON; each line must be an object") from None
        entry = entry if isinstance(entry, dict) else {}
        prompt, text = entry.get("prompt", ""), entry.get("completion", entry.get("text"))
        if not isinstance(text, str) or not isinstance(prompt, str):
            raise UserError(f'{path}, line {number}: needs {{"text": ...}} or {{"prompt": ..., "completion": ...}}')
        yield prompt, text
