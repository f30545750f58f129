"""Run an encoder's single file in ONNX Runtime: texts in, vectors out, with the arguments of the other runtimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export.interface import SENTENCE_EMBEDDING
from mlx_transformer.core.inputs import Passes
from mlx_transformer.core.text_embedding import TextEmbedding, parse_embedding
from mlx_transformer.generation.embed import BATCH_TOKENS, Embedder
from mlx_transformer.generation.translate import as_lines
from mlx_transformer.generation.verbs import TextVerbs
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import parse_json
from mlx_transformer.text.tokenizer import Tokenizer, unicode_texts

from .metadata import TOKENIZER, VECTOR

if TYPE_CHECKING:
    from export.runtime.sessions import Session
    from mlx_transformer.core.config import TransformerConfig


class VectorModel(TextVerbs):
    """A file of `export_search`, from an encoder, with text; opened by `open_file`.

    >>> open_file("model.onnx").embed(["a text"]).shape
    (1, 384)
    """

    has_steps = False

    def __init__(
        self, path: Path, session: Session, metadata: dict[str, str], config: TransformerConfig, passes: Passes
    ):
        self.path, self.where, self.session = path, str(path), session
        self.metadata, self.config, self.passes = metadata, config, passes

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer(self.metadata[TOKENIZER])

    @cached_property
    def text_embedding(self) -> TextEmbedding | None:
        return parse_embedding(parse_json(self.metadata[VECTOR], f"{self.path}: damaged", "export it again"), self.path)

    def embedder(self, **options: Any) -> Embedder:
        return FileEmbedder(self, **options)


class FileEmbedder(Embedder):
    """An `Embedder` whose work is all in the file. A "row" is the text itself, where others have ids."""

    def __init__(self, model: VectorModel, **options: Any):
        about = model.config, model.tokenizer, model.text_embedding
        super().__init__(*about, lambda ids, mask: None, model.where, passes=model.passes, **options)
        self.session, made = model.session, model.text_embedding
        if self.kind != "dense":
            raise UserError(f"{model.where}: gives one vector of a text; for kind={self.kind} export a folder")
        assert made is not None
        if self.embedding.arithmetic != made.arithmetic or self.prompt != made.prompt():
            raise UserError(
                f"{model.where}: pooling, length and prompt are in the file: leave them out, or export a folder"
            )

    def rows(
        self, texts: Sequence[str], first_line: int = 1, on_overlong: Callable[[int], None] | None = None
    ) -> list[Any]:
        lines = list(unicode_texts(as_lines(texts)))
        for i, line in enumerate(lines if on_overlong is not None else []):
            if len(self.prompt + line) > self.most - 2:  # no token is shorter than a character
                super().rows([line], first_line + i, on_overlong)
        return lines

    def vectors(
        self, rows: Any, done: Callable[[float], None] = lambda share: None, of_text: bool = True
    ) -> NDArray[np.float32]:
        """Return vectors as `Embedder.vectors` does; rows are texts."""
        if not all(isinstance(row, str) for row in rows):
            raise UserError(f"{self.where}: takes text, not ids: export a folder")
        vectors = np.zeros((len(rows), self.dimensions), np.float32)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        parts = []
        while order:
            count = max(1, BATCH_TOKENS // self._passes.at_once // max(1, len(rows[order[0]])))
            parts.append(order[:count])
            order = order[count:]

        def compute(part: list[int]) -> tuple[list[int], NDArray[np.float32]]:
            texts = np.array([rows[i] for i in part], object)
            rows_of_part = np.asarray(self.session.run([SENTENCE_EMBEDDING], {"text": texts})[0])
            if not np.isfinite(rows_of_part).all():
                raise UserError(f"{self.where}: its output is not finite; check its weights")
            return part, rows_of_part

        computed = 0
        for part, rows_of_part in self._passes.in_parallel(compute, parts):
            vectors[part] = (
                rows_of_part
                if self.dimensions == self.width
                else self.embedding.shortened(list(rows_of_part), self.dimensions)
            )
            computed += len(part)
            done(computed / len(rows))
        return vectors
