"""The encoder whose vectors another one learns (Reimers and Gurevych 2020, "Making Monolingual Sentence Embeddings
Multilingual using Knowledge Distillation", section 2).

A student whose vectors are narrower learns their projection to as many dimensions as it has: of all linear maps the one
that keeps most of the inner products between the texts of the run (the first eigenvectors of V^T V).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.text_embedding import read_embedding
from mlx_transformer.core.tokenizer import checked_tokenizer
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.progress import quiet_progress


def check_teacher(folder: str) -> None:
    """Raise `UserError` unless the checkpoint is an encoder that says how a text's vector is made."""
    checkpoint = open_checkpoint(folder, verify=False)
    if checkpoint.config.architecture != "encoder" or checked_tokenizer(checkpoint) is None:
        raise UserError(f"teacher = {folder!r}: is no encoder with a vocabulary")
    if read_embedding(checkpoint.folder, checkpoint.config.d_model) is None:
        raise UserError(f"teacher = {folder!r}: doesn't say how a text's vector is made (embedding.json)")


class Teacher:
    """`teacher(texts)` -> their vectors (N, width). The first texts decide on the projection, if there is one."""

    def __init__(self, folder: str, width: int):
        self.model, self.folder, self.width = Transformer.load(folder), folder, width
        self._projection: NDArray[np.float64] | None = None
        own = self.model.embedder().width
        if own < width:
            raise UserError(
                "teacher = {!r}: its vectors have {} numbers, the student's {}: lower {d_model}", folder, own, width
            )

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        with quiet_progress("teacher") as report:
            vectors = self.model.embed(texts, done=lambda share: report(share, "vectors"))
        if vectors.shape[1] == self.width:
            return vectors
        wide = vectors.astype(np.float64)
        if self._projection is None:
            _, directions = np.linalg.eigh(wide.T @ wide)
            self._projection = directions[:, ::-1][:, : self.width]
        narrow = wide @ self._projection
        unit = self.model.text_embedding is not None and self.model.text_embedding.normalize
        lengths = np.linalg.norm(narrow, axis=1, keepdims=True)
        return (narrow / np.maximum(lengths, 1e-12) if unit else narrow).astype(np.float32)
