"""Open a model to look inside: for word alignments, and for `explain`'s pages about a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.runtime.folder import verify_export
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import KINDS, TransformerConfig
from mlx_transformer.core.folders import Place
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.text_embedding import TextEmbedding, read_embedding
from mlx_transformer.core.tokenizer_files import tokenizer_path
from mlx_transformer.generation.alignment import CrossWeights, alignment_layer, cross_weights_by
from mlx_transformer.generation.settings import Settings, read_settings
from mlx_transformer.generation.translate import USES, fitting_tokenizer
from mlx_transformer.system.errors import Name, UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .cases import Case
from .engines import Engine, full_name, open_engine
from .engines.mlx_engine import has_gpu
from .reference import Reference

RUNTIMES = ("mlx", "onnxruntime", "reference")


@dataclass(frozen=True)
class Opened:
    """An opened model: its engine shows inner values, e.g. attention weights."""

    folder: Path
    runtime: str
    engine: Engine
    config: TransformerConfig
    tokenizer: Tokenizer

    @cached_property
    def reference(self) -> Reference:
        """A float32 reference for what lies around the layers, e.g. embedding and classifier.

        It has the model's own parameters, but zeros for those inside layers (except `.positions.`).
        """
        shapes, zero = parameter_shapes(self.config), np.float32(0)
        read = {
            name: np.asarray(array, np.float32)
            for _, name, array in self.engine.parameters()
            if name in shapes and (".layers." not in name or ".positions." in name)
        }
        rest = {name: np.broadcast_to(zero, shape) for name, shape in shapes.items() if name not in read}
        return Reference(self.config, {**read, **rest}, np.float32)

    @cached_property
    def embedding(self) -> TextEmbedding | None:
        """How to make a text's vector; None if the folder doesn't say."""
        return read_embedding(self.folder, self.config.d_model)

    @cached_property
    def settings(self) -> Settings:
        """The folder's default search settings, and the model's languages."""
        return read_settings(self.folder, self.config)

    @property
    def label(self) -> str:
        """The runtime in words, with a precision other than float32, e.g. "ONNX Runtime, CPU, int8"."""
        engine, details = self.engine, self.engine.details()
        names = {"mlx": "MLX", "onnxruntime": "ONNX Runtime", "reference": "NumPy reference"}
        runtime = self.runtime.partition(":")[0]
        where = details.get("provider", "").removesuffix("ExecutionProvider") or str(engine.device).upper()
        parts = [names[runtime]] if runtime == "reference" else [names[runtime], where]
        computed = details.get("computed in", engine.precision)
        return ", ".join([*parts, *([computed] if computed != "float32" else [])])


def open_model(
    folder: Path,
    runtime: str | None = None,
    threads: int | None = None,
    verify: bool = True,
    precision: str | None = None,
) -> Opened:
    """Open a checkpoint with MLX, or an ONNX folder with ONNX Runtime.

    Without MLX the NumPy reference runs a checkpoint.

    runtime: another runtime, by its name in `validate --runtimes`, e.g. "mlx:gpu".
    precision: a precision of the ONNX folder, in place of a runtime.
    verify: compare files with their manifest's digests.

    Raises UserError if the folder is neither, has no tokenizer, or doesn't go with the runtime.
    """
    if precision is not None:
        runtime = f"onnxruntime:cpu:all:{precision}"
    if folder.is_file():
        raise UserError(f"{folder}: is a file, which shows nothing from within; give a checkpoint or an ONNX folder")
    onnx = Place.of(folder).check_model().onnx
    chosen = full_name(runtime or ("onnxruntime" if onnx else _best()))
    name = chosen.partition(":")[0]
    if name not in RUNTIMES:
        raise UserError(f"runtime {chosen!r}: choose from {', '.join(RUNTIMES)}, with options as validate has them")
    if (name == "onnxruntime") != onnx:
        kind = "an ONNX folder" if onnx else "a checkpoint"
        needs = "a checkpoint folder" if onnx else "an ONNX folder (mlx-transformer export writes one)"
        raise UserError(f"{folder}: is {kind}; runtime {chosen} needs {needs}")
    if onnx:
        if verify:
            verify_export(folder)
        engine, path = open_engine(chosen, None, folder, threads), tokenizer_path(folder)
    else:
        if threads is not None:
            raise UserError("{}: is a checkpoint; {} is for ONNX folders", folder, Name("threads"))
        checkpoint = open_checkpoint(folder, verify).widened()
        engine, path = open_engine(chosen, checkpoint, None), checkpoint.tokenizer_path
    config = engine.config
    tokenizer = None if path is None else Tokenizer.load(path)
    architecture = config.architecture
    tokenizer = fitting_tokenizer(config, tokenizer, str(folder), architecture, USES[architecture], words=False)
    return Opened(folder, chosen, engine, config, tokenizer)


def cross_weights(model: Opened) -> CrossWeights:
    """Return a function to compute the cross-attention weights of pairs of texts, averaged over heads.

    For models whose search doesn't return the weights. The layer is `alignment_layer(config)`. Raises UserError if the
    model isn't an encoder-decoder.
    """
    if model.config.architecture != "encoder-decoder":
        kind = KINDS[model.config.architecture]
        raise UserError(f"{model.folder}: is {kind}; what aligns source and target is an encoder with a decoder")
    name = f"decoder.layers.{alignment_layer(model.config)}.cross_attention.weights"

    def attention(source: NDArray, real: NDArray, read: NDArray) -> NDArray:
        case = Case("pairs", source, None if real.all() else real, read, 1)
        return np.asarray(model.engine.points(case, [name])[name], np.float32).mean(axis=1)

    return cross_weights_by(attention, model.config)


def _best() -> str:
    if find_spec("mlx") is None:
        return "reference"
    return "mlx:gpu" if has_gpu() else "mlx"
