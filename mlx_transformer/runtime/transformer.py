"""A checkpoint run by MLX: the network with its tokenizer, and methods for text such as `translate`.

model, tokenizer = load("runs/mine")
model.translate("A man is riding a bicycle.", beam=4)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_transformer import nn
from mlx_transformer.core.checkpoint import (
    CHECKPOINT,
    FloatName,
    is_of_norm,
    open_checkpoint,
    precision_of,
    save_checkpoint,
    stays_wide,
)
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import Place
from mlx_transformer.core.heads import DENSE, EMBEDDING
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.parameters import check_parameters
from mlx_transformer.core.quantization import Quantization, widened
from mlx_transformer.core.tokenizer_files import tokenizer_path
from mlx_transformer.decoding.steps import Model
from mlx_transformer.generation.settings import Settings, files_with_weights, read_settings
from mlx_transformer.generation.verbs import TextVerbs
from mlx_transformer.nn.attention import Attention, MakeAttention
from mlx_transformer.nn.cache import check_cache
from mlx_transformer.nn.lora import delta_of, keep_adapter
from mlx_transformer.nn.parameters import named_parameters
from mlx_transformer.nn.quantize import as_mlx, quantization_of, use_quantized_layers
from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError

from .decoding import MlxModel, evaluating

if TYPE_CHECKING:
    from mlx_transformer.core.text_embedding import TextEmbedding
    from mlx_transformer.families.conversion import Imported
    from mlx_transformer.text.tokenizer import Tokenizer


class Transformer(nn.Transformer, TextVerbs):
    """`nn.Transformer`, which maps ids to logits, with methods for text if it has a tokenizer."""

    def __init__(self, config: TransformerConfig, attention: MakeAttention = Attention):
        super().__init__(config, attention)
        self._folder: Path | None = None

    @classmethod
    def from_weights(
        cls, config: TransformerConfig, weights: Mapping[str, np.ndarray], quantization: Quantization | None = None
    ) -> Transformer:
        """A model in evaluation mode with these parameters. Raises `UserError` if names or shapes don't fit the config.

        quantization: schemes of the matrices that `weights` holds as integers, scales and biases.
        """
        shapes = {name: tuple(array.shape) for name, array in weights.items()}
        check_parameters(config, shapes, "weights", quantization)
        return cls._filled(config, weights.items(), quantization)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        verify: bool = True,
        revision: str | None = None,
        precision: FloatName | None = None,
    ) -> Transformer:
        """Open a model in evaluation mode.

        folder: a checkpoint, a run's folder, a published model that `import` reads, or a name on the Hugging Face Hub,
        e.g. "Helsinki-NLP/opus-mt-en-de". revision: branch, tag or commit on the Hub. verify: compare the files with
        the digests in their manifest. precision: the type to compute in, "float32", "float16" or "bfloat16"; by default
        the file's own.
        Quantised matrices stay quantised, in MLX's quantised layers; an adapter is kept beside them, and merged into
        other matrices. Raises `UserError` if a file is missing or damaged.
        """
        from mlx_transformer.families.hub import find_model

        place = find_model(folder, revision)
        if Place.of(place.folder).is_importable:
            from mlx_transformer.families.conversion import read_published  # imports all families: rarely needed

            return cls._published(read_published(place.folder), str(folder), precision)
        checkpoint = open_checkpoint(place.folder, verify)
        precision = precision or checkpoint.precision
        model = cls._filled(checkpoint.config, checkpoint.stored(), checkpoint.quantization, precision)
        keep_adapter(model, checkpoint)
        model._folder, model.where = checkpoint.folder, str(folder)
        return model

    @classmethod
    def _published(cls, ours: Imported, where: str, precision: FloatName | None) -> Transformer:
        from mlx_transformer.text.tokenizer import Tokenizer

        precision = precision or precision_of(ours.weights, ours.config, ours.quantization)
        model = cls._filled(ours.config, ours.weights.items(), ours.quantization, precision)
        model.where, model.__dict__["generation"] = where, ours.settings
        model.text_embedding = ours.text_embedding
        model.tokenizer = None if ours.tokenizer is None else Tokenizer(ours.tokenizer, where)
        return model

    @classmethod
    def _filled(
        cls,
        config: TransformerConfig,
        weights: Iterable[tuple[str, Any]],
        quantization: Quantization | None,
        precision: FloatName | None = None,
    ) -> Transformer:
        model = cls(config)  # MLX is lazy: the fresh weights are never computed
        if quantization:
            use_quantized_layers(model, quantization, getattr(mx, precision or "float32"))
        arrays = widened(weights, quantization or {})
        model.load_weights([(name, _converted(name, x, config, precision)) for name, x in arrays], strict=True)
        model.eval()
        mx.eval(model.parameters())
        return model

    def save(self, folder: Target, force: bool = False) -> Path:
        """Write a checkpoint folder with weights and tokenizer; return its path.

        Quantised matrices are stored as integers, everything else in its own type. force: replace an earlier checkpoint
        in `folder`, once the new one is complete. Raises `UserError` for a folder with other contents, and if an
        adapter is beside the model's weights.
        """
        output = claim(folder, CHECKPOINT, force)
        if any(delta_of(layer) is not None for layer in self.modules()):
            raise UserError(f"{self.where}: has an adapter beside its weights: merge it, or copy the folder")
        text = None if self.tokenizer is None else self.tokenizer.to_json()
        own = files_with_weights(self.generation, self.place)
        if self.text_embedding is not None:
            others = {name: text for name, text in own["texts"].items() if name not in (EMBEDDING, DENSE)}
            own["texts"] = others | self.text_embedding.texts()
            own["tensors"] = self.text_embedding.tensors()
        return save_checkpoint(output, self.config, self.weights(), text, quantization=quantization_of(self), **own)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the loaded folder, read on first use; None if it has none. Can be set."""
        from mlx_transformer.text.tokenizer import Tokenizer

        path = None if self._folder is None else tokenizer_path(self._folder)
        return None if path is None else Tokenizer.load(path)

    @property
    def precision(self) -> str:
        """The type it computes in, e.g. "bfloat16": of its embedding, or of the scales of a quantised embedding."""
        types = (array.dtype for _, array in named_parameters(self))
        return str(next(each for each in types if mx.issubdtype(each, mx.floating))).removeprefix("mlx.core.")

    @property
    def place(self) -> Path | None:
        return self._folder

    @cached_property
    def generation(self) -> Settings:
        return {} if self._folder is None else read_settings(self._folder, self.config)

    @cached_property
    def text_embedding(self) -> TextEmbedding | None:
        from mlx_transformer.core.text_embedding import read_embedding  # few models have one

        return None if self._folder is None else read_embedding(self._folder, self.config.d_model)

    def use_cache_bits(self, bits: int | None) -> None:
        if bits is not None:
            check_cache(self.config, bits, self.where)
        self.cache_bits = bits

    @property
    def depends_on_rounding(self) -> bool:
        return self.cache_bits is not None

    @contextmanager
    def decoding(self) -> Iterator[Model]:
        """The model for a search; dropout is off within this block."""
        with evaluating(self):
            yield MlxModel(self)

    def token_logits(self, ids: list[list[int]], **others: Any) -> Any:
        with evaluating(self):
            return self(ids, **others).astype(mx.float32)

    def token_vectors(self, ids: NDArray, mask: NDArray) -> Any:
        with evaluating(self):
            return self.encode(ids, None if mask.all() else mask.astype(bool)).astype(mx.float32)


def _converted(name: str, array: Any, config: TransformerConfig, precision: FloatName | None) -> mx.array:
    """A stored array in MLX, computed at once, so that no other copy stays in memory."""
    converted = as_mlx(np.asarray(array))
    if mx.issubdtype(converted.dtype, mx.floating):
        kind = str(converted.dtype).removeprefix("mlx.core.") if precision is None else precision
        wide = stays_wide(name, kind, config) and (converted.dtype == mx.float32 or not is_of_norm(name))
        converted = converted.astype(mx.float32 if wide else getattr(mx, kind))
    mx.eval(converted)
    return converted


def load(
    folder: str | Path, verify: bool = True, revision: str | None = None, precision: FloatName | None = None
) -> tuple[Transformer, Tokenizer | None]:
    """Open a model in evaluation mode, and its tokenizer (None if it has none).

    folder: a checkpoint, a run's folder, a published model that `import` reads, or a name on the Hugging Face Hub.
    revision: branch, tag or commit on the Hub. verify: compare the files with the digests in their manifest. precision:
    the type to compute in; by default the file's own.
    Raises `UserError` if a file is missing or damaged.

    >>> model, tokenizer = load("runs/mine")
    >>> model.translate("A man is riding a bicycle.", beam=4)
    """
    model = Transformer.load(folder, verify, revision, precision)
    return model, model.tokenizer
