"""Plain text as documents, from a file, a folder or a pattern, and batches of packed documents for a decoder.

`documents` says whether each line or each whole file is a document. A `.jsonl` file has one object per line: {"text":
...}, or {"prompt": ..., "completion": ...}, of which only the completion is learned. Files may be packed (.gz, .zst).

`PackedBatches` packs documents into rows of equal length, B rows of L tokens, with hardly any padding. A document that
fits into a row isn't cut; a longer document is cut into pieces, each learned by itself. Documents in a row don't see
each other: `segments` says to which document each token belongs, for attention and positions. Rows are packed once;
their order changes in every epoch.
"""

from __future__ import annotations

import glob
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import digest_of

from .batches import BatchSettings
from .epochs import BatchesByEpoch, StepArrays
from .line_files import WatchBytes, json_blocks, line_blocks, unpacked_suffix, whole_text, within_memory

Cut = Literal["line", "file"]
HINT = "restore it from a copy"


@dataclass(frozen=True)
class Documents:
    """Texts to learn. `prompts[i]`, often "", comes before `texts[i]` and is not learned.

    digests: SHA-256 of the text, for run.json.
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
    """Read (documents, number of empty documents left out) from a file, a folder with subfolders, or a pattern, e.g.
    "src/**/*.py".

    documents: whether a line or a whole file is a document; None: lines of a single file, else whole files. Raises
    UserError, e.g. if a file is missing, not UTF-8 or not JSON lines, or there is no text.
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


Piece = tuple[NDArray, int]
"""(ids, number of first targets not to learn, i.e. the prompt): ids[:-1] are the inputs, ids[1:] the targets."""


@dataclass(frozen=True)
class PackedBatch:
    """A step's input. tokens: the number of targets to learn, by which the loss is divided."""

    ids: NDArray  # (B, L) int32: each document as bos and its tokens without eos; padding on the right
    targets: NDArray  # (B, L) int32: each position's next token, eos at the end; pad_id where nothing is learned
    segments: NDArray | None
    """(B, L) int32: 1, 2, ... for the documents of a row, 0 for padding; None if each row has only one document."""
    tokens: int

    def arrays(self, pad_id: int) -> StepArrays:
        return self.targets, None, self.ids, None, self.segments


class PackedBatches(BatchesByEpoch[PackedBatch]):
    """The batches of a corpus of documents, for any epoch.

    documents: lists of ids that end with eos. prompts: for each document the ids before it that are not learned,
    without bos and eos. Rows have `row_length` tokens, and batches as many rows as `batch_tokens` allows. settings: the
    fields of `BatchSettings`. Only documents whose prompt already fills a row are dropped, and counted in `dropped`.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        row_length: int = 256,
        **settings: Any,
    ):
        s = BatchSettings(**settings)
        super().__init__(s.seed)
        self.pad_id, self.bos_id, self.row_length = s.pad_id, s.bos_id, row_length
        both = list(zip(prompts or [()] * len(documents), documents, strict=True))
        fitting = [(prompt, ids) for prompt, ids in both if len(prompt) < row_length]
        self.dropped = len(both) - len(fitting)
        self._pieces = [piece for prompt, ids in fitting for piece in _pieces(prompt, ids, row_length, s.bos_id)]
        if not self._pieces:
            raise UserError("no document fits rows of {} tokens; raise {max_length}", row_length)
        self._rows = _pack([len(ids) - 1 for ids, _ in self._pieces], row_length)
        tokens = sum(len(ids) - 1 for ids, _ in self._pieces)
        self.batch_tokens = s.budget(row_length, tokens, f"max_length = {row_length}")
        self._batch_rows = self.batch_tokens // row_length // s.row_multiple * s.row_multiple

    def __len__(self) -> int:
        """The number of batches in an epoch, the same in each."""
        return -(-len(self._rows) // self._batch_rows)

    def plan(self, random: np.random.RandomState) -> list[NDArray]:
        """The row numbers of each batch of an epoch."""
        return np.array_split(random.permutation(len(self._rows)), len(self))

    def build(self, part: NDArray, epoch: int, index: int) -> PackedBatch:
        shape = self._batch_rows, self.row_length
        targets, ids = np.full(shape, self.pad_id, np.int32), np.full(shape, self.pad_id, np.int32)
        segments = np.zeros(shape, np.int32)
        for row, packed in enumerate(part):
            start = 0
            for number, piece in enumerate(self._rows[packed], start=1):
                tokens, unlearned = self._pieces[piece]
                place = slice(start, start + len(tokens) - 1)
                ids[row, place], targets[row, place] = tokens[:-1], tokens[1:]
                targets[row, start : start + unlearned] = self.pad_id
                segments[row, place] = number
                start = place.stop
        single = segments.max() <= 1  # a causal decoder doesn't see padding on the right, so no segments are needed
        return PackedBatch(ids, targets, None if single else segments, int((targets != self.pad_id).sum()))


def _pieces(prompt: Sequence[int], document: Sequence[int], length: int, bos_id: int) -> Iterator[Piece]:
    """Cut a document with its prompt into pieces of a row's length."""
    ids = np.array([bos_id, *prompt, *document], np.int32)
    for start in range(0, len(ids) - 1, length):
        yield ids[start : start + length + 1], max(0, len(prompt) - start)


def _pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack pieces into rows by best fit decreasing: longest piece first, each into the fullest row with room for it."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the different amounts of room left in rows, sorted
    for piece in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(rooms, lengths[piece])
        if place == len(rooms):
            row, room = len(rows), row_length
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        rows[row].append(piece)
        if left := room - lengths[piece]:
            if not with_room.setdefault(left, []):
                insort(rooms, left)
            with_room[left].append(row)
    return rows
