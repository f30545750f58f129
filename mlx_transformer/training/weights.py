"""What a run's checkpoints hold of its model.

All weights as they are; or, where an adapter is trained, the weights with the adapter merged into them in float32, so
that every command takes any of the run's folders, and beside them the adapter, from which the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from mlx_transformer.convert.average import averaged
from mlx_transformer.core.adapter import ADAPTER, ARRAYS, Adapter, AdapterConfig, read_adapter
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.quantization import Packed, tensors_of
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.quantize import quantization_of

Arrays = dict[str, NDArray]
FOLDER = "adapter"


class Weights:
    """Of a run that trains the model itself. `arrays`, here its parameters, are what is trained; None: as they are."""

    def __init__(self, model: Transformer):
        self.model = model

    def tree(self) -> Any:
        """The arrays, as MLX has them."""
        return self.model.parameters()

    def arrays(self) -> Arrays:
        return {name: np.array(value) for name, value in cast(list[tuple[str, mx.array]], tree_flatten(self.tree()))}

    def table(self, arrays: Arrays | None = None) -> Arrays:
        """Every parameter of the table of `core/parameters.py`."""
        return self.arrays() if arrays is None else arrays

    def beside(self, arrays: Arrays | None = None) -> tuple[dict[str, str], dict[str, Arrays]]:
        """Further files of a checkpoint: texts and arrays by their names."""
        return {}, {}

    def read(self, folder: Path) -> Arrays:
        """The arrays of a checkpoint of the run."""
        return dict(open_checkpoint(folder).tensors())

    def average(self, folders: Sequence[Path]) -> Arrays:
        """Their mean over checkpoints of the run."""
        return averaged(folders)

    def restore(self, folder: Path) -> None:
        """Go on with those of a checkpoint of the run."""
        arrays: Any = tree_unflatten([(name, mx.array(array)) for name, array in self.read(folder).items()])
        self.model.update(arrays)

    def save(self, folder: Path, tokenizer_json: str) -> None:
        """Write a checkpoint as it is."""
        texts, tensors = self.beside()
        save_checkpoint(folder, self.model.config, self.table(), tokenizer_json, texts=texts, tensors=tensors)

    def write(self, out: Path, arrays: Arrays, tokenizer_json: str) -> Path:
        """What a run leaves in its folder: OUT/model."""
        return save_checkpoint(out / "model", self.model.config, self.table(arrays), tokenizer_json)


class AdapterWeights(Weights):
    """Of a run that trains an adapter, whose arrays they are."""

    def __init__(self, model: Transformer, config: AdapterConfig):
        super().__init__(model)
        self.config = config

    def tree(self) -> Any:
        return self.model.trainable_parameters()

    def table(self, arrays: Arrays | None = None) -> Arrays:
        adapter = self._adapter(arrays)
        return {name: adapter.merged(name, weight) for name, weight in self._base().items()}

    def beside(self, arrays: Arrays | None = None) -> tuple[dict[str, str], dict[str, Arrays]]:
        adapter = self._adapter(arrays)
        return {ADAPTER: adapter.json()}, {ARRAYS: dict(adapter.arrays)}

    def read(self, folder: Path) -> Arrays:
        adapter = read_adapter(folder)
        adapter.check_fits(self.model.config, str(folder / ARRAYS))
        return dict(adapter.arrays)

    def average(self, folders: Sequence[Path]) -> Arrays:
        found = [self.read(folder) for folder in folders]
        means = {name: np.stack([arrays[name] for arrays in found]).mean(axis=0, dtype=np.float64) for name in found[0]}
        return {name: np.asarray(mean, np.float32) for name, mean in means.items()}

    def write(self, out: Path, arrays: Arrays, tokenizer_json: str) -> Path:
        """OUT/adapter, and OUT/model with it merged."""
        self._adapter(arrays).write(out / FOLDER)
        return super().write(out, arrays, tokenizer_json)

    def _adapter(self, arrays: Mapping[str, NDArray] | None) -> Adapter:
        return Adapter(self.config, self.arrays() if arrays is None else arrays)

    def _base(self) -> Arrays:
        """The parameters that are not trained, integers as the numbers that they stand for."""
        stored, schemes, found = self.model.weights(), quantization_of(self.model), Arrays()
        for name in parameter_shapes(self.model.config):
            if name in schemes:
                words, scales, biases = (stored[part] for part in tensors_of(name))
                found[name] = Packed(words, scales, biases, schemes[name]).dequantised()
            else:
                found[name] = stored[name]
        return found


def weights_of(model: Transformer, adapter: AdapterConfig | None) -> Weights:
    return Weights(model) if adapter is None else AdapterWeights(model, adapter)
