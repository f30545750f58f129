"""Plain text to learn a language from: documents, each by itself, from files, folders or patterns of file names.

A file is a document a line, or as a whole (`documents`). A `.jsonl` file has an object a line: {"text": ...}, or
{"prompt": ..., "completion": ...}, of which only the completion is learned. Each may be packed, as .gz or .zst.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Literal

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import digest_of

from .line_files import WatchBytes, json_blocks, line_blocks, unpacked_suffix, whole_text, within_memory

Cut = Literal["line", "file"]
HINT = "restore it from a copy"


@dataclass(frozen=True)
class Documents:
    """Texts to learn; `prompts[i]`, mostly empty, is read before `texts[i]` and not learned.

    `digests` are SHA-256, for the record of a run.
    """

    texts: list[str]
    prompts: list[str]

    @cached_property
    def digests(self) -> dict[str, str]:
        parts = (part.encode(errors="surrogatepass") + b"\0" for part in (*self.prompts, *self.texts))
        return {"text": digest_of(parts)}

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lines(self) -> Iterator[str]:
        """All text, for a vocabulary."""
        yield from (prompt for prompt in self.prompts if prompt)
        yield from self.texts

    def select(self, indices: Sequence[int]) -> Documents:
        return Documents([self.texts[i] for i in indices], [self.prompts[i] for i in indices])


def read_documents(where: str, documents: Cut | None = None) -> tuple[Documents, int]:
    """Read (documents, how many empty ones were left out) from a file, a folder (all files below it), or a pattern such
    as "src/**/*.py".

    `documents` says whether one is a line or a whole file; None: a line of a single file, a whole file of several.
    `UserError` names a file that is missing, not UTF-8 or not JSON lines, and a place without any text.
    """
    files = list(_files(where))
    is_single = len(files) == 1 and str(files[0]) == where
    cut = documents or ("line" if is_single else "file")
    pairs: list[tuple[str, str]] = []
    watch = within_memory(where)
    for path in files:
        if unpacked_suffix(path) == ".jsonl":
            pairs += _jsonl(path, watch)
        elif cut == "file":
            pairs.append(("", whole_text(path, watch=watch, hint=HINT)))
        else:
            pairs += [("", line) for lines in line_blocks(path, watch=watch, hint=HINT) for line in lines]
    usable = [(prompt, text) for prompt, text in pairs if text.strip()]
    if not usable:
        raise UserError(f"{where}: holds no text; give files with text in them")
    return Documents([text for _, text in usable], [prompt for prompt, _ in usable]), len(pairs) - len(usable)


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


def _jsonl(path: Path, watch: WatchBytes) -> Iterator[tuple[str, str]]:
    for where, _, entry in chain.from_iterable(json_blocks(path, watch=watch, hint=HINT)):
        entry = entry if isinstance(entry, dict) else {}
        prompt, text = entry.get("prompt", ""), entry.get("completion", entry.get("text"))
        if not isinstance(text, str) or not isinstance(prompt, str):
            raise UserError(f'{where}: needs {{"text": ...}} or {{"prompt": ..., "completion": ...}}')
        yield prompt, text
