"""Pictures in place of words: their patches go through the encoder, and the decoder puts them in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.runtime.transformer import Transformer

from .drawing import LINE, canvas, heat_map
from .measure import how_many, largest
from .network import trained
from .row import Found, Row, above, below, equal

PIXELS, PATCH, WIDTH = 16, 4, 32
"""Pixels on a side of a picture and of a patch, of which there are 16; d_model."""

WORDS = ("<pad>", "<start>", "<end>", "small", "large", "circle", "square", "cross", "left", "right")

START, END = 1, 2

STEPS, UNSEEN = 250, 120


def pictures(count: int, seed: int) -> tuple[np.ndarray, list[list[int]]]:
    """Pictures (N, 16, 16) of one shape each, in noise, and what they show, in ids: `large cross left`."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:PIXELS, :PIXELS]
    drawn, said = [], []
    for _ in range(count):
        size, shape, side = (int(rng.integers(n)) for n in (2, 3, 2))
        dy, dx = y - rng.integers(4, 12), x - rng.integers(3, 5) - 8 * side
        far, near = np.maximum(abs(dy), abs(dx)), np.minimum(abs(dy), abs(dx))
        inside = (np.hypot(dy, dx), far, far + 3.0 * (near > 0))[shape] < (2.2, 3.7)[size]
        drawn.append(inside + rng.normal(0, 0.1, inside.shape))
        said.append([3 + size, 5 + shape, 8 + side])
    return np.stack(drawn).astype(np.float32), said


def patches_of(pictures: np.ndarray) -> np.ndarray:
    """(N, 16, 16) pixels -> (N, 16, 16): of each picture 16 patches, row by row, 16 pixels each."""
    side = PIXELS // PATCH
    cut = pictures.reshape(-1, side, PATCH, side, PATCH).swapaxes(2, 3)
    return cut.reshape(-1, side * side, PATCH * PATCH)


class PictureReader(nn.Module):
    """A linear map from patches to vectors, and a Transformer that reads these in place of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(PATCH * PATCH, WIDTH)
        sizes = {"d_model": WIDTH, "d_ff": 64, "dropout": 0.0, "max_positions": 32}
        self.model = Transformer(TransformerConfig.preset("tiny", len(WORDS), norm_placement="pre", **sizes))

    def vectors(self, pictures: np.ndarray) -> mx.array:
        """(N, 16, d_model)."""
        return self.projection(mx.array(patches_of(pictures)))

    def __call__(self, pictures: np.ndarray, words: Sequence[Sequence[int]]) -> mx.array:
        """Teacher-forced logits (N, 4, V) of three words and the end."""
        return self.model(inputs_embeds=self.vectors(pictures), target_ids=[[START, *row] for row in words])

    def words(self, pictures: np.ndarray) -> list[list[int]]:
        """Greedily."""
        return self.model.generate(inputs_embeds=list(np.array(self.vectors(pictures))), max_new_tokens=4)


def train(reader: PictureReader, steps: int = STEPS) -> None:
    """Fresh pictures at each step."""

    def loss(reader: PictureReader, shown: np.ndarray, said: list[list[int]]) -> mx.array:
        return mx.mean(nn.losses.cross_entropy(reader(shown, said), mx.array([[*row, END] for row in said])))

    trained(reader, loss, lambda i: pictures(64, seed=i), steps)
    reader.eval()


class InWords(NamedTuple):
    """Pictures that were not trained on, put in words, in ids."""

    pictures: np.ndarray
    shown: list[list[int]]
    untrained: list[list[int]]
    trained: list[list[int]]
    reader: PictureReader


@lru_cache
def in_words() -> InWords:
    """Words before the training and after it."""
    mx.random.seed(0)
    reader = PictureReader()
    unseen, shown = pictures(UNSEEN, seed=STEPS)
    untrained = reader.words(unseen)
    train(reader)
    return InWords(unseen, shown, untrained, reader.words(unseen), reader)


def patches() -> Found:
    """Of one picture, in an encoder without positions; of many, in the one that was trained."""
    drawn, _ = pictures(1, seed=0)
    mx.random.seed(0)
    config = TransformerConfig.preset("tiny", 24, architecture="encoder", decoder_layers=0, d_model=WIDTH, d_ff=64)
    model = Transformer(dataclasses.replace(config, positions="none"))
    model.eval()
    vectors = nn.Linear(PATCH * PATCH, WIDTH)(mx.array(patches_of(drawn)))
    order = mx.array(np.random.default_rng(0).permutation(16))
    encoded, moved = (model.encode(inputs_embeds=x) for x in (vectors, vectors[:, order]))
    changed = model.encode(inputs_embeds=vectors.at[:, 5].add(1.0))
    seen = in_words()
    return {
        "shape of the output, 16 patches": encoded.shape[1:],
        "largest |Encoder(P x) - P Encoder(x)|, without positions": largest(moved - encoded[:, order]),
        "outputs that change with one patch": how_many(mx.any(encoded != changed, axis=-1)),
        "share of unseen pictures put in the right words, untrained": _right(seen.untrained, seen.shown),
        "after 250 steps": _right(seen.trained, seen.shown),
    }


def _right(said: list[list[int]], shown: list[list[int]]) -> float:
    return float(np.mean([a == b for a, b in zip(said, shown, strict=True)]))


def draw_in_words() -> Any:
    """Unseen pictures, cut into patches, and what a trained model says of them."""
    seen = in_words()
    figure, panels = canvas(4, height=2.2)
    for axes, picture, words in zip(panels, seen.pictures, seen.trained, strict=False):
        heat_map(axes, picture.clip(0), most=1.4, aspect="equal")
        axes.set(xticks=[], yticks=[])
        for edge in range(PATCH, PIXELS, PATCH):
            axes.axhline(edge - 0.5, color=LINE, linewidth=0.8)
            axes.axvline(edge - 0.5, color=LINE, linewidth=0.8)
        axes.set_title(" ".join(WORDS[word] for word in words), fontsize=8.5)
    return figure


ROWS = (
    Row(
        41,
        "Nothing in attention is about words: patches of a picture go through the encoder as well.",
        "x_i = W patch_i + b",
        {
            "shape of the output, 16 patches": equal(16, 32),
            "largest |Encoder(P x) - P Encoder(x)|, without positions": below(1e-5),
            "outputs that change with one patch": equal(16),
            "share of unseen pictures put in the right words, untrained": below(0.1),
            "after 250 steps": above(0.7),
        },
        patches,
        (Transformer.encode, PictureReader),
        (
            "claims/test_pictures.py::test_both_runtimes_put_pictures_in_the_same_words",
            "mlx_transformer/nn/test_inputs_embeds.py::test_what_the_embedding_gives_is_encoded_as_its_ids_are",
            "export/targets/test_vectors.py::test_validate_proves_it_for_vectors_of_no_table",
        ),
        figure=draw_in_words,
        missing="Of a video the patches would have a time, too: that isn't built.",
    ),
)
