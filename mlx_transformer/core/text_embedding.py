"""How a text becomes one vector: what embedding.json in a model's folder says, and the arithmetic that it means.

    the encoder's output (L, D) -> pooled, one part a way (P D) -> dense layers -> unit length -> its first numbers

    {"format": 1, "pooling": ["mean"], "normalize": true, "max_length": 256,
     "prompts": {"query": "query: "}, "dense": [{"width": 768, "activation": "tanh", "bias": true}]}

Besides, a text may have a weight of each token, and a vector of each token but the first (BGE-M3: Chen et al. 2024,
section 3.2):

    a token's row h (D,) -> max(0, w h + b)             "sparse": true
                         -> W h + b, of unit length     "multi": how many numbers

Fields that have their default are left out. The matrices are in embedding.safetensors beside it.
Numbers are computed in float64, a text at a time, and rounded once: neither padding nor other texts can change them.
Folders of sentence-transformers hold the same facts (`families/sentence_folder.py`).
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
"""A vector is divided by its length, or by this, whichever is larger."""

Activation = Literal["identity", "tanh", "relu", "gelu"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
Width = Annotated[int, Bounds(at_least=1, at_most=2**16)]
Length = Annotated[int, Bounds(at_least=1, at_most=2**20)]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A layer behind the pooling: activation(x W^T + b)."""

    width: Width
    """Numbers that it gives."""
    activation: Activation = "tanh"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class TextEmbedding:
    """The arithmetic that makes a text's vector of the encoder's output. `UserError` lists all that is wrong with
    it."""

    pooling: Sequence[Pooling] = ("mean",)
    """The way in which the tokens' rows become one; of several ways the vectors stand side by side, in this order."""
    dense: Sequence[Dense] = ()
    """Layers that follow, in this order."""
    normalize: bool = False
    """Divide the vector by its length."""
    max_length: Length | None = None
    """Tokens of a text that are read, special ones included; unset: as many as the model has positions."""
    lower_case: bool = False
    """Text is lower-cased before it reaches the tokenizer."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """The prompts that stand before texts of one kind, by the kind's name."""
    default_prompt: str | None = None
    """The name of the prompt that texts have unless another is asked for."""
    prompt_counts: bool = True
    """Whether a prompt's tokens are pooled with the text's."""
    similarity: Similarity | None = None
    """The similarity that its vectors are compared by; nothing here depends on it."""
    sparse: bool = False
    """Tokens have weights."""
    multi: Width | None = None
    """Numbers of a token's vector; unset: tokens have none."""
    weights: Mapping[str, NDArray] = field(default_factory=dict, repr=False, compare=False)
    """The dense layers' dense.N.weight (width, width before) and dense.N.bias (width,), sparse.weight (1, D),
    sparse.bias (1,), multi.weight (multi, D) and multi.bias (multi,), float32."""

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
        """Return how many numbers a vector has."""
        return self.dense[-1].width if self.dense else len(self.pooling) * d_model

    def read(self) -> TextEmbedding:
        """Return the same with the numbers of all weights; those of a published folder are still in their files."""
        return replace(self, weights={name: np.asarray(array) for name, array in self.weights.items()})

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of vectors that it makes of a text."""
        return ("dense", *(["sparse"] if self.sparse else []), *(["multi"] if self.multi else []))

    @cached_property
    def arithmetic(self) -> TextEmbedding:
        """The part of it behind the encoder, without the treatment of a text before: two of them are equal if they make
        the same of the same output."""
        own = {"normalize": self.normalize, "sparse": self.sparse, "multi": self.multi, "weights": self.weights}
        return TextEmbedding(pooling=tuple(self.pooling), dense=tuple(self.dense), **own)

    def cut(self, dimensions: int | None, d_model: int) -> TextEmbedding:
        """Return what gives the first numbers alone, of unit length where vectors are; None: as it is.

        They are chosen by one more dense layer, a row of zeros and a one for each, which every reader of the folder
        knows. `UserError` for more numbers than there are.
        """
        if dimensions is None or dimensions == (width := self.width(d_model)):
            return self
        if not 1 <= dimensions < width:
            raise UserError("{dimensions}: the model's vectors have {}", width, dimensions=dimensions)
        chosen = {f"dense.{len(self.dense)}.weight": np.eye(dimensions, width, dtype=np.float32)}
        layer = Dense(width=dimensions, activation="identity", bias=False)
        return replace(self, dense=(*self.dense, layer), weights={**self.weights, **chosen})

    def shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each of `weights`."""
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
        """Raise `UserError`, which begins with `where`, unless its matrices are those that it needs."""
        shapes, stored = self.shapes(d_model), {name: array.shape for name, array in self.weights.items()}
        wrong = [f"{name} is {stored.get(name, 'missing')}, expected {shape}" for name, shape in shapes.items()]
        wrong = [text for text, name in zip(wrong, shapes, strict=True) if stored.get(name) != shapes[name]]
        wrong += [f"unknown {name} {shape}" for name, shape in stored.items() if name not in shapes]
        if wrong:
            raise UserError(f"{where}: {first_of(wrong)}")

    def prompt(self, name: str | None = None) -> str:
        """Return a prompt's text, that of the default one without a name. `UserError` for a name that isn't there."""
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
        """Return the vectors (B, W) of an encoder's output (B, L, D) and its mask (B, L), 1 on tokens.

        skipped: so many first tokens of each row, a prompt's, are pooled where `prompt_counts` says so. dimensions: the
        first numbers alone, which a model that was trained for it still compares well by (Kusupati et al. 2022); of a
        unit vector again one of unit length.
        """
        places = [np.flatnonzero(row) for row in np.asarray(mask)]
        pooled_places = [row if self.prompt_counts else row[skipped:] for row in places]
        return self.shortened(
            [self._vector(each, row) for each, row in zip(memory, pooled_places, strict=True)], dimensions
        )

    def shortened(self, vectors: Sequence[NDArray], dimensions: int | None) -> NDArray[np.float32]:
        """Return the first numbers of vectors (B, W) of any length, of unit length where vectors are."""
        return np.stack([self._cut(row.astype(np.float64), dimensions) for row in vectors]).astype(np.float32)

    def token_weights(self, memory: NDArray) -> NDArray[np.float32]:
        """Return the weight (L,) of each token of a text's rows (L, D), 0 or more."""
        return np.maximum(self._of_tokens("sparse", memory)[:, 0], 0).astype(np.float32)

    def token_vectors(self, memory: NDArray) -> NDArray[np.float32]:
        """Return the vectors (L - 1, `multi`) of all tokens but the first of a text's rows (L, D), of unit length."""
        vectors = self._of_tokens("multi", memory[1:])
        return (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), SMALLEST_NORM)).astype(np.float32)

    def _of_tokens(self, head: str, rows: NDArray) -> NDArray[np.float64]:
        weight, bias = (self.weights[f"{head}.{name}"].astype(np.float64) for name in ("weight", "bias"))
        return rows.astype(np.float64) @ weight.T + bias

    def _vector(self, memory: NDArray, places: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return (L, D) and the places of its tokens -> (W,), of whatever length."""
        rows = memory[places].astype(np.float64)
        x = np.concatenate([pooled(rows, places, way) for way in self.pooling])
        for i, layer in enumerate(self.dense):
            x = self.weights[f"dense.{i}.weight"].astype(np.float64) @ x
            x = x + self.weights[f"dense.{i}.bias"] if layer.bias else x
            x = _ACTIVATIONS[layer.activation](x)
        return x

    def _cut(self, x: NDArray[np.float64], dimensions: int | None) -> NDArray[np.float64]:
        x = x[:dimensions]
        return x / max(float(np.sqrt(x @ x)), SMALLEST_NORM) if self.normalize else x

    def json(self) -> str:
        """Return the text of the file."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "weights"}
        values |= {"pooling": list(self.pooling), "dense": [dataclasses.asdict(layer) for layer in self.dense]}
        usual = dict(max_length=None, dense=[], prompts={}, default_prompt=None, similarity=None)
        usual |= dict(lower_case=False, prompt_counts=True, sparse=False, multi=None)
        written = {name: value for name, value in values.items() if name not in usual or value != usual[name]}
        return json.dumps({"format": FORMAT, **written}, indent=2, ensure_ascii=False) + "\n"

    def texts(self) -> dict[str, str]:
        """Return {name: contents} of its file."""
        return {EMBEDDING: self.json()}

    def tensors(self) -> dict[str, Mapping[str, NDArray]]:
        """Return {name: arrays} of the file beside it, {} where it needs none."""
        return {DENSE: self.weights} if self.weights else {}


def read_embedding(folder: Path, d_model: int) -> TextEmbedding | None:
    """Read what a folder says of its vectors; None if it says nothing. `UserError` for files that are damaged, or not
    of a model of this width."""
    path = folder / EMBEDDING
    if not path.is_file():
        return None
    embedding = parse_embedding(read_json(path), path, lambda: _weights(folder))
    embedding.check_fits(d_model, str(folder / DENSE))
    return embedding


def parse_embedding(values: Any, path: Path, weights: Callable[[], Mapping[str, NDArray]] = dict) -> TextEmbedding:
    """Make it of what the file says. `UserError` for what is no such thing; weights: called if it needs some."""
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
    from mlx_transformer.system.tensors import read_tensors  # few have any, and need what reads them

    return read_tensors(folder / DENSE)


def embedding_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Return (name, path) of those of its files that a folder has, for who copies them as they are."""
    return ((name, folder / name) for name in (EMBEDDING, DENSE) if (folder / name).is_file())


def _gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()])


_ACTIVATIONS: dict[Activation, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
}
