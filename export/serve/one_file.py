"""One file with the search inside, served as a folder is: the same requests, batches and limits.

It cannot stream: it gives whole translations alone. Where the tokenizer is in the file too, rows are text,
not ids, and nobody knows how many tokens were generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mlx_transformer.generation.options import Hypothesis
from mlx_transformer.generation.search import SharedSearch
from mlx_transformer.generation.translate import Overlong, Translation, join

from .requests import RequestError

if TYPE_CHECKING:
    from export.search import SearchModel
    from mlx_transformer.core.tokenizer import Tokenizer

NO_STREAM = "this server's model gives whole texts, none in pieces: send the text to /translate, or leave out stream"


@dataclass(frozen=True)
class Text(Hypothesis):
    """An output of which the text is known alone: it has no ids."""

    text: str


class OneFile:
    """A `SearchModel` as a `Model` of the server."""

    has_steps = False

    def __init__(self, model: SearchModel):
        self.model, self.config, self.generation = model, model.config, model.generation
        self.depends_on_batch = model.depends_on_batch

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer

    @cached_property
    def translator(self) -> Any:
        return Texts(self.model) if self.model.takes_text else self.model.translator

    def search(self, rows: Sequence[Any], *, share: SharedSearch, **options: Any) -> Sequence[Sequence[Hypothesis]]:
        if not self.model.takes_text:
            return self.model.search(rows, share=share, **options)
        numbers = [1 + place for place in share.row_numbers or range(len(rows))]
        outputs = self.model.translated(rows, numbers, share=share, **options)
        return [[Text([], best.score, best.text) for best in each] for each in outputs]

    def stream(self, line: str, **options: Any) -> Iterator[str]:
        raise RequestError(400, NO_STREAM)

    def stream_ids(self, ids: Sequence[int], **options: Any) -> Iterator[int]:
        raise RequestError(400, NO_STREAM)


class Texts:
    """In place of a `Translator`: rows of text for a file that takes text."""

    shows_attention = False

    def __init__(self, model: SearchModel):
        self.model, self.config = model, model.config

    def rows(self, lines: Sequence[str], overlong: Overlong) -> tuple[list[int], list[str]]:
        return self.model.pieces(lines, overlong)

    def texts(self, lines: int, owners: Sequence[int], outputs: Sequence[Sequence[Text]]) -> list[list[Translation]]:
        return join(lines, owners, [[Translation(best.text, best.score) for best in each] for each in outputs])
