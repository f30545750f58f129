"""Decoders that start from a vector of zeros, as Marian's do: training leaves it as it is.

It is the row that padding and start token share, the last one. No output may be this token: its bias bars it, and the
loss is of the others.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transformer.core.parameters import BARRED, target_embedding_name
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.classifier import Classifier
from mlx_transformer.nn.parameters import named_parameters


class ZeroStart:
    """The row of a model that stays zero: nothing, unless its decoder starts with padding and that row is zeros."""

    def __init__(self, model: Transformer):
        config, parameters = model.config, dict(named_parameters(model))
        name = target_embedding_name(config)
        table, bias = parameters.get(name), parameters.get("output_proj.bias")
        self._module: str | None = None
        self._row, self._outputs = config.bos_id, config.vocab_size
        if not config.has_decoder or config.bos_id != config.pad_id:
            return
        if table is not None and mx.issubdtype(table.dtype, mx.floating) and not mx.any(table[self._row]).item():
            self._module = name.removesuffix(".weight")
        if bias is not None:
            self._outputs = 1 + int(np.flatnonzero(np.array(bias.astype(mx.float32)) > BARRED)[-1])

    def classifier(self, classifier: Classifier) -> Classifier:
        """The model's classifier without the outputs at the end that the bias bars."""
        every = self._outputs == classifier.config.vocab_size
        return classifier if every else classifier.among(slice(self._outputs))

    def masked(self, gradients: Any) -> Any:
        """Return the gradients, with zeros for the row."""
        if (gradient := gradients.get(self._module, {}).get("weight")) is not None:
            gradient[self._row] = 0
        return gradients
