"""The head of an encoder alone, on its last layer: one frozen, validated description.

One vector of the vectors of a text's tokens. Sources: Devlin et al. 2019 (the first token's); Reimers and Gurevych
2019, "Sentence-BERT", section 3 (mean, maximum); Muennighoff 2022, "SGPT" (the weighted mean, the last token's).

D model. No import of NumPy: the choices are shown by the command line's help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import check_fields, unknown_keys

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HeadKind = Literal["vocabulary", "hidden", "pooled", "classes", "token-classes", "spans"]
HeadActivation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]
SPANS = ("start", "end")
"""The meaning of the two logits of spans."""
OUTSIDE, BEGINS, CONTINUES = "O", "B-", "I-"
"""The label of what is in no entity, and how labels of a token begin that begins one, or continues it."""
HeadPooling = Literal["first", "mean"]


@dataclass(frozen=True, kw_only=True)
class Head:
    """The way from an encoder's last layer to what it gives: one vector of each row, where it gives one (`pooling`);
    norm(activation(dense(x))), where there is an `activation`; and a classifier, in the kinds that have one.

    Raises `UserError` listing every problem at once.
    """

    kind: HeadKind = "vocabulary"
    """vocabulary: logits of each position over the vocabulary; hidden: the last layer as it is; pooled: a vector of
    each row; classes: logits over `labels` of each row; token-classes: of each position; spans: two logits of each
    position, that an answer begins and that it ends there."""
    activation: HeadActivation | None = None
    """That of one more dense layer, which there is only if this is set."""
    norm: bool = False
    """A norm of the model's kind behind the activation."""
    bias: bool = True
    """Bias of the dense layer."""
    pooling: HeadPooling = "first"
    """Whence a row's vector: its first token, or the mean of its tokens."""
    labels: tuple[str, ...] = ()
    """The names of the classes, in their order."""
    several: bool = False
    """Whether a row may be of several classes, or of none: each has a probability of its own."""
    scores: bool = False
    """Whether the logits of a row are what it was trained to say, as they are (regression), and no probabilities."""

    def __post_init__(self) -> None:
        problems = check_fields(self)
        if isinstance(self.labels, list | tuple) and all(isinstance(label, str) for label in self.labels):
            object.__setattr__(self, "labels", tuple(self.labels))
        else:
            problems.append(f"labels={self.labels!r:.60} must be a list of texts")
        if not problems:
            problems = self._relations()
        if problems:
            raise UserError("head: " + "; ".join(problems))

    def _relations(self) -> list[str]:
        named, whole = self.kind in ("classes", "token-classes"), self.activation is None
        wrong = {
            f"kind={self.kind!r} needs labels": named and not self.labels,
            f"several: kind={self.kind!r} has no classes of rows": self.several and self.kind != "classes",
            f"scores: kind={self.kind!r} has no classes of rows": self.scores and self.kind != "classes",
            "several and scores: give one of them": self.several and self.scores,
            f"labels: kind={self.kind!r} has none": bool(self.labels) and not named,
            "kind='pooled' needs an activation": self.kind == "pooled" and whole,
            "kind='hidden' has no activation": self.kind == "hidden" and not whole,
            "norm and bias are of the dense layer, which an activation makes": whole and (self.norm or not self.bias),
            f"pooling={self.pooling!r}: kind={self.kind!r} gives no vector of a row": self.pooling != "first"
            and not self.per_row,
        }
        return [problem for problem, there in wrong.items() if there]

    @property
    def classifies(self) -> bool:
        """Whether the last step is a classifier."""
        return self.kind not in ("hidden", "pooled")

    @property
    def per_row(self) -> bool:
        """Whether it gives one vector of each row, not of each position."""
        return self.kind in ("pooled", "classes")

    def to_dict(self) -> dict[str, Any]:
        """Return every field that isn't at its default."""
        values = {**asdict(self), "labels": list(self.labels)}
        plain = {**asdict(VOCABULARY), "labels": []}
        return {name: value for name, value in values.items() if value != plain[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Head:
        """Strict: an unknown key is an error."""
        if problems := unknown_keys(values, cls):
            raise UserError("head: " + "; ".join(problems))
        return cls(**values)


VOCABULARY = Head()
"""The paper's classifier and nothing else."""


EMBEDDING, DENSE = "embedding.json", "embedding.safetensors"
"""The files of a folder that say how a text's vector is made (`text_embedding.py`), and hold the weights for it."""

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]
"""The first token's row; the largest number of each column; the mean of all rows; their sum divided by the square root
of how many there are; their mean with weights 1, 2, 3, ... by their places; the last token's row."""
Kind = Literal["dense", "sparse", "multi"]
"""The kind of vector that is made of a text: one vector; a weight of each of its tokens; a vector of each of its
tokens."""


def pooled(rows: NDArray[np.float64], places: NDArray[np.intp], way: Pooling) -> NDArray[np.float64]:
    """Return a vector (D,) of the rows (tokens, D), which stand at `places` (tokens,); zeros of no rows."""
    count = len(rows)
    if not count:
        return rows.sum(axis=0)
    if way in ("cls", "last"):
        return rows[0] if way == "cls" else rows[-1]
    if way == "max":
        return rows.max(axis=0)
    if way == "weighted_mean":
        weights = places + 1.0
        return weights @ rows / weights.sum()
    return rows.sum(axis=0) / (count if way == "mean" else count**0.5)
