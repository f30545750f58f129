"""The head of an encoder-only model, and pooling: one vector (D,) for a text from its tokens' vectors (L, D).

Sources for pooling: Devlin et al. 2019 (first token); Reimers and Gurevych 2019, "Sentence-BERT", section 3 (mean,
maximum); Muennighoff 2022, "SGPT" (weighted mean, last token).

Doesn't import NumPy, as the command line's help reads the choices here.
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
"""Names of the two logits of a head of kind "spans"."""
OUTSIDE, BEGINS, CONTINUES = "O", "B-", "I-"
"""Labels of tokens: outside any entity ("O"), at its start (e.g. "B-PER") or within it ("I-PER")."""
HeadPooling = Literal["first", "mean"]


@dataclass(frozen=True, kw_only=True)
class Head:
    """The head on an encoder's last layer (B, L, D).

    Three steps, each optional: pooling to (B, D) for kinds with one output per row, norm(activation(dense(x))) if
    `activation` is set, and a classifier. Raises `UserError` listing every problem at once.

    >>> Head(kind="classes", labels=("negative", "positive"))
    """

    kind: HeadKind = "vocabulary"
    """vocabulary: logits over the vocabulary for each position; hidden: the last layer unchanged; pooled: a vector for
    each row; classes: logits over `labels` for each row; token-classes: the same for each position; spans: two logits
    for each position, for the start and the end of an answer."""
    activation: HeadActivation | None = None
    """Adds a dense layer with this activation; unset: no dense layer."""
    norm: bool = False
    """Norm of the model's kind after the activation."""
    bias: bool = True
    """Bias of the dense layer."""
    pooling: HeadPooling = "first"
    """A row's vector: the first token's, or the mean over its tokens."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in the order of the logits."""
    several: bool = False
    """A row may have several classes or none: each class has its own probability (sigmoid)."""
    scores: bool = False
    """The logits of a row are scores (regression), not log-probabilities."""

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
        """Whether the head ends with a classifier."""
        return self.kind not in ("hidden", "pooled")

    @property
    def per_row(self) -> bool:
        """Whether the output is one vector per row, not one per position."""
        return self.kind in ("pooled", "classes")

    def to_dict(self) -> dict[str, Any]:
        """{field: JSON value} of all fields that differ from their default."""
        values = {**asdict(self), "labels": list(self.labels)}
        plain = {**asdict(VOCABULARY), "labels": []}
        return {name: value for name, value in values.items() if value != plain[name]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Head:
        """Build a head from `to_dict`'s form. Raises `UserError` for unknown keys."""
        if problems := unknown_keys(values, cls):
            raise UserError("head: " + "; ".join(problems))
        return cls(**values)


VOCABULARY = Head()
"""The default: only the paper's classifier."""


EMBEDDING, DENSE = "embedding.json", "embedding.safetensors"
"""Files in a model's folder with the settings and weights of its text embedding (`text_embedding.py`)."""

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]
"""cls: the first token; max: the maximum of each column; mean: over all tokens; mean_sqrt_len: the sum divided by the
square root of the token count; weighted_mean: weights 1, 2, 3, ... by position; last: the last token."""
Kind = Literal["dense", "sparse", "multi"]
"""dense: one vector for a text; sparse: a weight for each of its tokens; multi: a vector for each of its tokens."""


def pooled(rows: NDArray[np.float64], places: NDArray[np.intp], way: Pooling) -> NDArray[np.float64]:
    """Pool token vectors `rows` (L, D) to one vector (D,). places: their positions in the text (L,), for weighted_mean.

    No rows give zeros.
    """
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
