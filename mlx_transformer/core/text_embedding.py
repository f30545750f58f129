"""Text embeddings: how the encoder's output becomes a text's vector. Settings are in embedding.json.

    encoder output (L, D) -> P kinds of pooling, concatenated (P D,) -> dense layers -> normalised -> cut (W,)

    {"format": 1, "pooling": ["mean"], "normalize": true, "max_length": 256,
     "prompts": {"query": "query: "}, "dense": [{"width": 768, "activation": "tanh", "bias": true}]}

A text can also have a weight for each token, and a vector for each token but the first (BGE-M3: Chen et al. 2024,
section 3.2):

    hidden state h (D,) of a token -> max(0, w h + b)                "sparse": true
                                   -> W h + b (M,), unit length      "multi": M

Optional fields with their default aren't written. Matrices are in embedding.safetensors. Vectors are computed in
float64, text by text, and rounded once, so padding and other texts of the batch can't change them. Folders of
sentence-transformers hold the same settings (`families/sentence_folder.py`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.system.errors import UserError, first_of
from mlx_transformer.system.fields import Bounds, check_fields, unknown_keys
from mlx_transformer.system.files import read_json

from .heads import DENSE, EMBEDDING, Kind, Pooling, pooled

FORMAT = 1
SMALLEST_NORM = 1e-12
"""Smallest divisor when a vector is divided by its length."""

Activation = Literal["identity", "tanh", "relu", "gelu"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
Width = Annotated[int, Bounds(at_least=1, at_most=2**16)]
Length = Annotated[int, Bounds(at_least=1, at_most=2**20)]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A layer after the pooling: activation(x W^T + b)."""

    width: Width
    """Width of its output."""
    activation: Activation = "tanh"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class TextEmbedding:
    """Settings and weights of a text embedding. Raises `UserError` with all problems.

    >>> embedding = TextEmbedding(pooling=["mean"], normalize=True)
    >>> embedding.vectors(memory, mask).shape  # (B, L, D), (B, L) -> (B, D)
    (2, 384)
    """

    pooling: Sequence[Pooling] = ("mean",)
    """How token vectors become one vector; the results of several ways are concatenated."""
    dense: Sequence[Dense] = ()
    """Dense layers after the pooling."""
    normalize: bool = False
    """Divide the vector by its length."""
    max_length: Length | None = None
    """Texts are cut to this many tokens, including special tokens; unset: as many as the model has positions."""
    lower_case: bool = False
    """Lower-case texts before the tokenizer."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts put before an input, by name, e.g. {"query": "query: "}."""
    default_prompt: str | None = None
    """Name of the prompt used if none is asked for."""
    prompt_counts: bool = True
    """Include the prompt's tokens in the pooling."""
    similarity: Similarity | None = None
    """Recommended similarity for comparing vectors; not used here."""
    sparse: bool = False
    """Compute token weights."""
    multi: Width | None = None
    """Width of token vectors; unset: none are computed."""
    weights: Mapping[str, NDArray] = field(default_factory=dict, repr=False, compare=False)
    """dense.N.weight (width, width before) and dense.N.bias (width,) of dense layers, sparse.weight (1, D),
    sparse.bias (1,), multi.weight (multi, D) and multi.bias (multi,), as they are stored: in float32, or 16 bits."""

    def __post_init__(self) -> None:
        problems = check_fields(self)
        ways = get_args(Pooling)
        if not isinstance(self.pooling, list | tuple) or not self.pooling:
            problems.append("pooling must be a list of at least one way")
        else:
            problems += [f"pooling: {way!r} is not one of {', '.join(ways)}" for way in self.pooling if way not in ways]
            if len(set(map(str, self.pooling))) < len(self.pooling):
                problems.append("pooling: names a way twice")
        for i, layer in enumerate(self.dense):
            problems += [f"dense {i}: {problem}" for problem in check_fields(layer)]
        texts = self.prompts
        if not isinstance(texts, Mapping) or not all(isinstance(x, str) for pair in texts.items() for x in pair):
            problems.append("prompts must be an object of texts")
        elif self.default_prompt is not None and self.default_prompt not in texts:
            problems.append(f"default_prompt={self.default_prompt!r} is none of the prompts")
        if problems:
            raise UserError("; ".join(problems))

    def width(self, d_model: int) -> int:
        """The width W of a text's vector."""
        return self.dense[-1].width if self.dense else len(self.pooling) * d_model

    def read(self) -> TextEmbedding:
        """Read all weights into memory; those of a published folder may still be in their files (`tensors.Stored`)."""
        return replace(self, weights={name: np.asarray(array) for name, array in self.weights.items()})

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of vectors that are computed for a text."""
        return ("dense", *(["sparse"] if self.sparse else []), *(["multi"] if self.multi else []))

    @cached_property
    def arithmetic(self) -> TextEmbedding:
        """Only the settings and weights applied after the encoder, without tokenizing and prompts.

        Equality ignores the weights.
        """
        own = {"normalize": self.normalize, "sparse": self.sparse, "multi": self.multi, "weights": self.weights}
        return TextEmbedding(pooling=tuple(self.pooling), dense=tuple(self.dense), **own)

    def cut(self, dimensions: int | None, d_model: int) -> TextEmbedding:
        """An embedding that keeps only the first `dimensions` numbers of a vector. None: unchanged.

        It adds a dense layer with an identity matrix (dimensions, W), which any reader of the folder understands.
        Raises `UserError` if the vector has fewer numbers.
        """
        if dimensions is None or dimensions == (width := self.width(d_model)):
            return self
        if not 1 <= dimensions < width:
            raise UserError("{dimensions}: the model's vectors have {}", width, dimensions=dimensions)
        chosen = {f"dense.{len(self.dense)}.weight": np.eye(dimensions, width, dtype=np.float32)}
        layer = Dense(width=dimensions, activation="identity", bias=False)
        return replace(self, dense=(*self.dense, layer), weights={**self.weights, **chosen})

    def shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """{name: shape} that `weights` must have."""
        shapes: dict[str, tuple[int, ...]] = {}
        width = len(self.pooling) * d_model
        for i, layer in enumerate(self.dense):
            shapes[f"dense.{i}.weight"] = (layer.width, width)
            if layer.bias:
                shapes[f"dense.{i}.bias"] = (layer.width,)
            width = layer.width
        for head, width in (("sparse", int(self.sparse)), ("multi", self.multi)):
            shapes |= {f"{head}.weight": (width, d_model), f"{head}.bias": (width,)} if width else {}
        return shapes

    def check_fits(self, d_model: int, where: str) -> None:
        """Raise `UserError` if a matrix is missing, unknown or has the wrong shape. where: the file named in it."""
        shapes, stored = self.shapes(d_model), {name: array.shape for name, array in self.weights.items()}
        wrong = [f"{name} is {stored.get(name, 'missing')}, expected {shape}" for name, shape in shapes.items()]
        wrong = [text for text, name in zip(wrong, shapes, strict=True) if stored.get(name) != shapes[name]]
        wrong += [f"unknown {name} {shape}" for name, shape in stored.items() if name not in shapes]
        if wrong:
            raise UserError(f"{where}: {first_of(wrong)}")

    def prompt(self, name: str | None = None) -> str:
        """The text of a prompt; None: the default prompt, or "" if there is none. Raises `UserError` for an unknown
        name."""
        chosen = self.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            known = f"it has {first_of(list(self.prompts), ', ')}" if self.prompts else "it has none"
            raise UserError("{prompt_name!r} is none of the model's prompts: {}", known, prompt_name=chosen)
        return self.prompts[chosen]

    def vectors(
        self, memory: NDArray, mask: NDArray, skipped: int = 0, dimensions: int | None = None
    ) -> NDArray[np.float32]:
        """Vectors (B, W) from the encoder's output (B, L, D) and its mask (B, L), 1 on tokens.

        skipped: number of prompt tokens at the start of each row, which are pooled only if `prompt_counts`. dimensions:
        keep only the first numbers, normalised again if `normalize`; for models trained for it (Matryoshka, Kusupati et
        al. 2022).
        """
        places = [np.flatnonzero(row) for row in np.asarray(mask)]
        pooled_places = [row if self.prompt_counts else row[skipped:] for row in places]
        return self.shortened(
            [self._vector(each, row) for each, row in zip(memory, pooled_places, strict=True)], dimensions
        )

    def shortened(self, vectors: Sequence[NDArray], dimensions: int | None) -> NDArray[np.float32]:
        """Cut vectors (B, W), not yet normalised, to their first `dimensions` numbers, and normalise if `normalize`."""
        return np.stack([self._cut(row.astype(np.float64), dimensions) for row in vectors]).astype(np.float32)

    def token_weights(self, memory: NDArray) -> NDArray[np.float32]:
        """Token weights (L,), at least 0, from a text's encoder output (L, D)."""
        return np.maximum(self._of_tokens("sparse", memory)[:, 0], 0).astype(np.float32)

    def token_vectors(self, memory: NDArray) -> NDArray[np.float32]:
        """Unit vectors (L - 1, multi) of all tokens but the first, from a text's encoder output (L, D)."""
        vectors = self._of_tokens("multi", memory[1:])
        return (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), SMALLEST_NORM)).astype(np.float32)

    def _of_tokens(self, head: str, rows: NDArray) -> NDArray[np.float64]:
        weight, bias = (self.weights[f"{head}.{name}"].astype(np.float64) for name in ("weight", "bias"))
        return rows.astype(np.float64) @ weight.T + bias  # (L, width)

    def _vector(self, memory: NDArray, places: NDArray[np.intp]) -> NDArray[np.float64]:
        """One text's vector (W,), not yet normalised. memory: (L, D); places: positions of the tokens to pool."""
        rows = memory[places].astype(np.float64)  # (tokens, D)
        x = np.concatenate([pooled(rows, places, way) for way in self.pooling])  # (P D,)
        for i, layer in enumerate(self.dense):
            x = self.weights[f"dense.{i}.weight"].astype(np.float64) @ x  # (width,)
            x = x + self.weights[f"dense.{i}.bias"] if layer.bias else x
            x = _ACTIVATIONS[layer.activation](x)
        return x

    def _cut(self, x: NDArray[np.float64], dimensions: int | None) -> NDArray[np.float64]:
        x = x[:dimensions]
        return x / max(float(np.sqrt(x @ x)), SMALLEST_NORM) if self.normalize else x

    def json(self) -> str:
        """The text of embedding.json."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "weights"}
        values |= {"pooling": list(self.pooling), "dense": [dataclasses.asdict(layer) for layer in self.dense]}
        usual = dict(max_length=None, dense=[], prompts={}, default_prompt=None, similarity=None)
        usual |= dict(lower_case=False, prompt_counts=True, sparse=False, multi=None)
        written = {name: value for name, value in values.items() if name not in usual or value != usual[name]}
        return json.dumps({"format": FORMAT, **written}, indent=2, ensure_ascii=False) + "\n"

    def texts(self) -> dict[str, str]:
        """{"embedding.json": its text}, for `save_checkpoint`."""
        return {EMBEDDING: self.json()}

    def tensors(self) -> dict[str, Mapping[str, NDArray]]:
        """{"embedding.safetensors": arrays}, for `save_checkpoint`; {} without weights."""
        return {DENSE: self.weights} if self.weights else {}


def read_embedding(folder: Path, d_model: int) -> TextEmbedding | None:
    """Read a folder's text embedding; None if it has no embedding.json.

    Raises `UserError` if a file is damaged or doesn't fit the width d_model.
    """
    path = folder / EMBEDDING
    if not path.is_file():
        return None
    embedding = parse_embedding(read_json(path), path, lambda: _weights(folder))
    embedding.check_fits(d_model, str(folder / DENSE))
    return embedding


def parse_embedding(values: Any, path: Path, weights: Callable[[], Mapping[str, NDArray]] = dict) -> TextEmbedding:
    """Build a text embedding from JSON values. weights: reads the weights; called only if they are needed.

    Raises `UserError` naming `path` for invalid values.
    """
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        form = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise UserError(f"{path}: format {form!r} is not known to this version (it reads format {FORMAT})")
    fields = {name: value for name, value in values.items() if name != "format"}
    problems = unknown_keys(fields, TextEmbedding) + ["weights are in a file of their own"] * ("weights" in fields)
    layers = fields.get("dense", [])
    if not isinstance(layers, list) or not all(isinstance(layer, dict) and "width" in layer for layer in layers):
        problems.append("dense must be a list of objects, each with its width")
    else:
        problems += [problem for layer in layers for problem in unknown_keys(layer, Dense)]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    needed = layers or fields.get("sparse") or fields.get("multi")
    arguments = {**fields, "dense": [Dense(**layer) for layer in layers], "weights": weights() if needed else {}}
    try:
        return TextEmbedding(**arguments)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _weights(folder: Path) -> Mapping[str, NDArray]:
    from mlx_transformer.system.tensors import read_tensors  # few embeddings have weights

    return read_tensors(folder / DENSE)


def embedding_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of the embedding files that a folder has, to copy them."""
    return ((name, folder / name) for name in (EMBEDDING, DENSE) if (folder / name).is_file())


def _gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()])


_ACTIVATIONS: dict[Activation, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
}
