"""Text in one language: documents from files, packed into batches for a decoder, or corrupted for a model to restore.

`documents` says whether each line or each whole file is a document. A `.jsonl` file has one object per line: {"text":
...}, {"prompt": ..., "completion": ...} or, for a decoder, {"messages": [...]}. Files may be packed (.gz, .zst).

`PackedBatches` packs documents into rows of equal length, B rows of L tokens, with hardly any padding. A document that
fits into a row isn't cut; a longer document is cut into pieces, each learned by itself. Documents in a row don't see
each other: `segments` says to which document each token belongs, for attention and positions. Rows are packed once;
their order changes in every epoch.

Corrupted text has masked tokens for an encoder, and missing spans for an encoder-decoder. Each epoch corrupts other
tokens. The choice depends only on (seed, epoch, batch).

Shapes: B rows, S tokens, M tokens to restore per row.
"""

from __future__ import annotations

import glob
import json
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

from .batches import Batch, BatchesOfOthers, BatchSettings, TokenBatches
from .epochs import BatchesByEpoch, StepArrays, legacy_random
from .line_files import WatchBytes, json_blocks, line_blocks, unpacked_suffix, whole_text, within_memory
from .ragged import padded, ragged

Cut = Literal["line", "file"]
HINT = "restore it from a copy"
ASSISTANT = "assistant"
"""The role of a model in a conversation."""


@dataclass(frozen=True)
class Documents:
    """Texts to learn. `prompts[i]`, often "", comes before `texts[i]`.

    Where `chats[i]` is a conversation, {"messages": [...]}, maybe with "tools", `texts[i]` is its JSON. digests:
    SHA-256 of the text, for run.json.
    """

    texts: list[str]
    prompts: list[str]
    chats: Sequence[dict[str, Any] | None] = ()
    """() without any conversation."""

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
        chats = [self.chats[i] for i in indices] if self.chats else ()
        return Documents([self.texts[i] for i in indices], [self.prompts[i] for i in indices], chats)


def read_documents(where: str, documents: Cut | None = None, chats: bool = False) -> tuple[Documents, int]:
    """Read (documents, number of empty documents left out) from a file, a folder with subfolders, or a pattern, e.g.
    "src/**/*.py".

    documents: whether a line or a whole file is a document; None: lines of a single file, else whole files. chats:
    whether lines of JSON may be conversations. Raises UserError, e.g. if a file is missing, not UTF-8 or not JSON
    lines, or there is no text.
    """
    files = list(_files(where))
    is_single = len(files) == 1 and str(files[0]) == where
    cut = documents or ("line" if is_single else "file")
    read: list[Entry] = []
    watch = within_memory(where)
    for path in files:
        if unpacked_suffix(path) == ".jsonl":
            read += _jsonl(path, watch, chats)
        elif cut == "file":
            read.append(("", whole_text(path, watch=watch, hint=HINT), None))
        else:
            read += [("", line, None) for lines in line_blocks(path, watch=watch, hint=HINT) for line in lines]
    usable = [entry for entry in read if entry[1].strip()]
    if not usable:
        raise UserError(f"{where}: holds no text; give files with text in them")
    prompts, texts, conversations = map(list, zip(*usable, strict=True))
    return Documents(texts, prompts, conversations if any(conversations) else ()), len(read) - len(usable)


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


Entry = tuple[str, str, dict[str, Any] | None]
"""(prompt, text, conversation)"""


def _jsonl(path: Path, watch: WatchBytes, chats: bool) -> Iterator[Entry]:
    forms = ['{"text": ...}', '{"prompt": ..., "completion": ...}', '{"messages": [...]}'][: 3 if chats else 2]
    for where, _, entry in chain.from_iterable(json_blocks(path, watch=watch, hint=HINT)):
        entry = entry if isinstance(entry, dict) else {}
        if chats and "messages" in entry:
            if not _is_conversation(entry["messages"]):
                raise UserError(f"{where}: messages is no list of objects with a role, one of them the assistant's")
            yield "", json.dumps(entry, ensure_ascii=False, sort_keys=True), entry
            continue
        prompt, text = entry.get("prompt", ""), entry.get("completion", entry.get("text"))
        if not isinstance(text, str) or not isinstance(prompt, str):
            raise UserError(f"{where}: needs {' or '.join(forms)}")
        yield prompt, text, None


def _is_conversation(messages: Any) -> bool:
    roles = [m.get("role") if isinstance(m, dict) else None for m in messages] if isinstance(messages, list) else []
    return ASSISTANT in roles and all(isinstance(role, str) for role in roles)


Piece = tuple[NDArray, NDArray]
"""(ids, which of them are learned): ids[:-1] are the inputs, ids[1:] the targets."""


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

    documents: lists of ids behind a start token. learned: for each document whether to learn each id; None: all. Rows
    have `row_length` tokens, and batches as many rows as `batch_tokens` allows. settings: the fields of
    `BatchSettings`. Documents of which nothing is learned in their first row, as the prompt fills it, are dropped, and
    counted in `dropped`.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        learned: Sequence[Sequence[bool]] | None = None,
        *,
        row_length: int = 256,
        **settings: Any,
    ):
        s = BatchSettings(**settings)
        super().__init__(s.seed)
        self.pad_id, self.row_length = s.pad_id, row_length
        every = ([True] * len(ids) for ids in documents)
        both = [
            (np.array(ids, np.int32), np.array(own, bool))
            for ids, own in zip(documents, every if learned is None else learned, strict=True)
        ]
        fitting = [(ids, own) for ids, own in both if own[1 : row_length + 1].any()]
        self.dropped = len(both) - len(fitting)
        self._pieces = [piece for ids, own in fitting for piece in _pieces(ids, own, row_length)]
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
                tokens, learned = self._pieces[piece]
                place = slice(start, start + len(tokens) - 1)
                ids[row, place], targets[row, place] = tokens[:-1], np.where(learned[1:], tokens[1:], self.pad_id)
                segments[row, place] = number
                start = place.stop
        single = segments.max() <= 1  # a causal decoder doesn't see padding on the right, so no segments are needed
        return PackedBatch(ids, targets, None if single else segments, int((targets != self.pad_id).sum()))


def _pieces(ids: NDArray, learned: NDArray, length: int) -> Iterator[Piece]:
    """Cut a document into pieces of a row's length; those of which nothing is learned are left out."""
    for start in range(0, len(ids) - 1, length):
        place = slice(start, start + length + 1)
        if learned[start + 1 : place.stop].any():
            yield ids[place], learned[place]


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


MASKED, RANDOM = 0.8, 0.1
"""Of the tokens to restore, 80 % become <mask>, 10 % a random token, 10 % stay (Devlin et al. 2019, section 3.1)."""


@dataclass(frozen=True)
class MaskedBatch:
    """A step's input for an encoder. tokens: the number of targets without padding."""

    ids: NDArray  # (B, S) int32, corrupted, each row ends with eos
    picked: NDArray  # (B, M) int32: positions of the tokens to restore
    targets: NDArray  # (B, M) int32: these tokens; pad_id in unused columns
    tokens: int

    def arrays(self, pad_id: int) -> StepArrays:
        is_token = self.ids != pad_id
        return self.targets, self.picked, self.ids, None if is_token.all() else is_token


class MaskedBatches(BatchesOfOthers[MaskedBatch]):
    """Masked language modelling (Devlin et al. 2019): a share of each row's tokens, at least one, must be restored.

    clean: batches whose source and target are the same text. words: for each text the word number of each token, to
    mask whole words; None: mask single tokens.
    """

    def __init__(
        self,
        clean: TokenBatches,
        mask_id: int,
        vocabulary: Sequence[int],
        share: float = 0.15,
        words: Sequence[Sequence[int]] | None = None,
    ):
        """vocabulary: the ids from which random tokens are drawn."""
        super().__init__(clean)
        self.mask_id, self.share = mask_id, share
        self._vocabulary = np.array(vocabulary, np.int32)
        self._words = None if words is None else ragged(words)

    def build(self, part: tuple[int, NDArray], epoch: int, index: int) -> MaskedBatch:
        clean, random = self.clean.build(part, epoch, index), legacy_random(self.seed, epoch, index)
        ids = clean.source.copy()
        rows, length = ids.shape
        most = max(1, round(self.share * (length - 1)))
        lengths = (ids != self.clean.pad_id).sum(axis=1) - 1  # eos is never masked
        counts = np.where(lengths > 0, np.maximum(1, np.round(self.share * lengths)), 0).astype(int)
        order = random.random_sample((rows, length))
        if self._words is not None:
            # All tokens of a word get the same random number, so they are next to each other in the order.
            words = padded([self._words[i] for i in part[1]], rows, length, 0)
            order = np.take_along_axis(order, np.minimum(words, length - 1), axis=1)
        order[np.arange(length) >= lengths[:, None]] = 2
        picked = np.argsort(order, axis=1, kind="stable")[:, :most].astype(np.int32)
        learned = np.arange(most) < counts[:, None]
        targets = np.where(learned, np.take_along_axis(ids, picked, axis=1), self.clean.pad_id)
        kind = random.random_sample(picked.shape)
        inputs = np.where(kind < MASKED, self.mask_id, random.choice(self._vocabulary, picked.shape))
        inputs = np.where(kind < MASKED + RANDOM, inputs, targets)
        row, column = np.nonzero(learned)
        ids[row, picked[row, column]] = inputs[row, column]
        return MaskedBatch(ids, picked, targets.astype(np.int32), int(learned.sum()))


class DenoisingBatches(BatchesOfOthers[Batch]):
    """Text infilling (Lewis et al. 2020, BART, section 2.2): spans of tokens are each replaced by one <mask>.

    share: of all tokens in spans. span: the mean of their Poisson-distributed lengths; a span of length 0 inserts a
    <mask>. The whole text is the target. clean: batches whose source and target are the same text.
    """

    def __init__(self, clean: TokenBatches, mask_id: int, share: float = 0.3, span: float = 3.0):
        super().__init__(clean)
        self.mask_id, self.share, self.span = mask_id, share, span

    def build(self, part: tuple[int, NDArray], epoch: int, index: int) -> Batch:
        clean, random = self.clean.build(part, epoch, index), legacy_random(self.seed, epoch, index)
        source = np.full_like(clean.source, self.clean.pad_id)
        for row, ids in enumerate(clean.source):
            length = int((ids != self.clean.pad_id).sum())
            if length:
                infilled = self._infilled(ids[: length - 1], random)[: source.shape[1] - 1]
                source[row, : len(infilled) + 1] = [*infilled, ids[length - 1]]
        longest = int((source != self.clean.pad_id).sum(axis=1).max())
        # On a device that compiles for each shape, S stays the bucket's length.
        width = source.shape[1] if self.clean.few_shapes else longest
        return Batch(source[:, :width], clean.target_in, clean.target_out, clean.tokens)

    def _infilled(self, ids: NDArray, random: np.random.RandomState) -> list[int]:
        to_hide = round(self.share * len(ids))
        hidden, starts = np.zeros(len(ids), bool), np.zeros(len(ids) + 1, bool)
        while to_hide > 0:
            length = min(int(random.poisson(self.span)), to_hide)
            start = random.randint(0, len(ids) - length + 1)
            starts[start] = True
            hidden[start : start + length] = True
            to_hide -= max(1, length)
        result: list[int] = []
        for i, id in enumerate(ids):
            # Adjacent spans share one <mask>.
            if starts[i] and (not hidden[i] or i == 0 or not hidden[i - 1]):
                result.append(self.mask_id)
            if not hidden[i]:
                result.append(int(id))
        return [*result, self.mask_id] if starts[-1] and not hidden[-1:].any() else result
