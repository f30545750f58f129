"""Save, restore and average a run's weights: checkpoints, OUT/best and OUT/model.

Without an adapter a checkpoint holds the weights as they are. With an adapter it holds the weights with the adapter
merged into them, in the base's types (integers become float32), so every command can read it. It also holds the adapter
itself, from which the run continues.

OUT/best     the checkpoint of the best validation, if the recipe sets `best`
OUT/model    the final weights, chosen by the recipe's `final`

Averaged are e.g. the last 5 or 20 checkpoints, as in the paper (section 6.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map, tree_unflatten
from numpy.typing import NDArray

from mlx_transformer.core.adapter import ADAPTER, ARRAYS, Adapter, AdapterConfig, read_adapter
from mlx_transformer.core.checkpoint import CHECKPOINT, Checkpoint, Tensors, open_checkpoint, resolve, save_checkpoint
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.generation.settings import files_with_weights, named_files, read_settings, settings_text
from mlx_transformer.nn import Transformer
from mlx_transformer.nn.parameters import named_arrays
from mlx_transformer.nn.quantize import as_mlx, as_numpy, quantization_of
from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import CARD
from mlx_transformer.system.tensors import Stored
from mlx_transformer.text.tokenizer import checked_tokenizer

from .options import TrainingOptions
from .progress import State
from .run_folder import Run

Arrays = dict[str, NDArray]
ADAPTER_FOLDER, BEST, MOVING = "adapter", "best", "moving_average"


class Weights:
    """The weights of a run without an adapter; the trained arrays are the model's parameters.

    base: the run's `start_from` folder. Its generation settings are copied into every checkpoint, and so is the model's
    embedding.json. Where a method takes `arrays`, None means the trained arrays of the current step.
    """

    def __init__(self, model: Transformer, base: Path | None = None):
        self.model = model
        settings = {} if base is None else read_settings(base, model.config)
        embedding = model.text_embedding
        made = {} if embedding is None else embedding.texts()
        self.files: dict[str, Any] = {"texts": {**settings_text(settings), **named_files(settings, base), **made}}
        self.files["tensors"] = {} if embedding is None else embedding.tensors()

    def tree(self) -> Any:
        """The trained arrays as a tree of MLX arrays."""
        return self.model.parameters()

    def arrays(self) -> Arrays:
        """The trained arrays as {name: NumPy array}."""
        return {name: np.array(value) for name, value in named_arrays(self.tree())}

    def table(self, arrays: Arrays | None = None) -> Tensors:
        """All weights of a checkpoint, with the names of `core/parameters.py`; read from the model one by one."""
        return self.arrays() if arrays is None else arrays

    def extra_files(self) -> dict[str, Any]:
        """A checkpoint's files other than weights and vocabulary, as arguments of `save_checkpoint`."""
        return self.files

    def read(self, folder: Path) -> Arrays:
        """Read the trained arrays from a checkpoint of the run."""
        return dict(open_checkpoint(folder).tensors())

    def average(self, folders: Sequence[Path]) -> Arrays:
        """The mean of the trained arrays over checkpoints of the run."""
        return averaged([open_checkpoint(folder) for folder in folders])

    def restore(self, folder: Path) -> None:
        """Continue with the trained arrays of a checkpoint of the run."""
        arrays: Any = tree_unflatten([(name, as_mlx(array)) for name, array in self.read(folder).items()])
        self.model.update(arrays)

    def save(self, folder: Path, tokenizer_json: str) -> None:
        """Write a checkpoint with the current weights."""
        output = claim(folder, CHECKPOINT, True, own=True)
        save_checkpoint(output, self.model.config, self.table(), tokenizer_json, **self.extra_files())

    def write(self, out: Path, arrays: Arrays, tokenizer_json: str, card: str) -> Path:
        """Write the final weights to OUT/model. card: the beginning of its model card."""
        files = {**self.files, "texts": {**self.files["texts"], CARD: card}}
        output = claim(out / "model", CHECKPOINT, True, own=True)
        return save_checkpoint(output, self.model.config, self.table(arrays), tokenizer_json, **files)


class AdapterWeights(Weights):
    """The weights of a run with an adapter; the trained arrays are the adapter and, if any, a new head."""

    def __init__(self, model: Transformer, config: AdapterConfig, base: Path | None = None):
        super().__init__(model, base)
        self.config = config
        self.head = {name for name, _ in named_arrays(self.tree())} - config.shapes(model.config).keys()
        stored = {} if base is None else open_checkpoint(base, verify=False).unread()
        self.types = {name: array.dtype for name, array in stored.items()}

    def tree(self) -> Any:
        return self.model.trainable_parameters()

    def table(self, arrays: Arrays | None = None) -> Tensors:
        adapter, new = self._adapter(arrays), {} if not self.head else self.arrays() if arrays is None else arrays
        held, schemes = dict(named_arrays(self.model.parameters())), quantization_of(self.model)

        def merged(name: str, dtype: np.dtype) -> NDArray:
            if name in schemes:
                own = {n: as_numpy(a) for n, a in held.items() if n.rpartition(".")[0] == name.rpartition(".")[0]}
                weight = schemes[name].packed(name, own).widened().dequantised()
            else:
                weight = as_numpy(held[name])
            return adapter.merged(name, weight.astype(dtype, copy=False))

        def later(name: str, shape: tuple[int, ...]) -> Any:
            dtype = self.types.get(name, np.dtype(np.float32))
            return Stored(shape, dtype, lambda: merged(name, dtype))

        shapes = parameter_shapes(self.model.config)
        return {name: new[name] if name in self.head else later(name, shapes[name]) for name in shapes}

    def extra_files(self) -> dict[str, Any]:
        adapter, files = self._adapter(None), self.files
        texts = {**files["texts"], ADAPTER: adapter.json()}
        return {**files, "texts": texts, "tensors": {**files["tensors"], ARRAYS: dict(adapter.arrays)}}

    def read(self, folder: Path) -> Arrays:
        adapter = read_adapter(folder)
        adapter.check_fits(self.model.config, str(folder / ARRAYS))
        head = super().read(folder) if self.head else {}
        return {**adapter.arrays, **{name: head[name] for name in self.head}}

    def average(self, folders: Sequence[Path]) -> Arrays:
        each = [self.read(folder) for folder in folders]
        means = {name: np.stack([arrays[name] for arrays in each]).mean(axis=0, dtype=np.float64) for name in each[0]}
        return {name: np.asarray(mean, np.float32) for name, mean in means.items()}

    def write(self, out: Path, arrays: Arrays, tokenizer_json: str, card: str) -> Path:
        """Write OUT/model with the adapter merged in, and OUT/adapter unless there is a new head."""
        if not self.head:
            self._adapter(arrays).write(out / ADAPTER_FOLDER, card)
        return super().write(out, arrays, tokenizer_json, card)

    def _adapter(self, arrays: Mapping[str, NDArray] | None) -> Adapter:
        arrays = self.arrays() if arrays is None else arrays
        return Adapter(self.config, {name: array for name, array in arrays.items() if name not in self.head})


class MovingAverage:
    """An exponential moving average of the trained arrays in float32: a <- d a + (1 - d) p after each step.

    At step n, d = min(decay, (1 + n) / (10 + n)), so that the first weights are soon forgotten.
    """

    def __init__(self, weights: Weights, decay: float):
        self.weights, self.decay = weights, decay
        self.values: Any = tree_map(lambda p: p, weights.tree())

    def step(self, number: int) -> None:
        """Update the average after step `number`, counted from 1."""
        decay = min(self.decay, (1 + number) / (10 + number))
        self.values = tree_map(lambda a, p: decay * a + (1 - decay) * p, self.values, self.weights.tree())
        mx.eval(self.values)

    @property
    def arrays(self) -> dict[str, NDArray]:
        return {name: np.array(value) for name, value in named_arrays(self.values)}


def final_weights(
    options: TrainingOptions, state: State, files: Run, weights: Weights, moving: MovingAverage | None
) -> tuple[dict[str, NDArray], dict[str, Any]]:
    """Return (the trained arrays for OUT/model, the entry for run.json, e.g. {"final": "last", "steps": [500]})."""
    if options.final == "best" and (files.folder / BEST).exists():
        return weights.read(files.folder / BEST), {"final": "best", "steps": [state.best_step]}
    if options.final == "average":
        folders = files.checkpoints()[-options.average :]
        steps = [int(folder.name.removeprefix("step-")) for folder in folders]
        return weights.average(folders), {"final": "average", "steps": steps}
    if options.final == "moving-average" and moving is not None:
        return moving.arrays, {"final": "moving-average", "steps": [state.step]}
    return weights.arrays(), {"final": "last", "steps": [state.step]}


def averaged(checkpoints: Sequence[Checkpoint]) -> dict[str, NDArray]:
    """The mean of each parameter, summed in float64, in the type of the first. Raises `UserError` if the configs
    differ."""
    first, *others = checkpoints
    for other in others:
        if other.config != first.config:
            raise UserError(f"{other.folder}: its config differs from that of {first.folder}; no average makes sense")
    means = {}
    for name in first.names():
        begin = first.tensor(name)
        total = begin.astype(np.float64)
        for other in others:
            total += other.tensor(name)
        means[name] = (total / len(checkpoints)).astype(begin.dtype)
    return means


def average_checkpoints(folders: Sequence[str | Path], out: Target, force: bool = False) -> Path:
    """Write the average of two or more checkpoints to the folder `out`; return its path.

    out: new or empty, or with `force` another checkpoint, which is replaced. Raises `UserError` if the checkpoints
    differ in config or tokenizer, or if `out` is one of them.
    """
    if len(folders) < 2:
        problem = f"{folders[0]}: is one checkpoint" if folders else "nothing to average"
        raise UserError(f"{problem}: give two or more of one run")
    output = claim(out, CHECKPOINT, force, *(resolve(folder) for folder in folders))
    opened = [open_checkpoint(folder) for folder in folders]
    texts = [checked_tokenizer(checkpoint) for checkpoint in opened]
    for checkpoint, text in zip(opened, texts, strict=True):
        if text != texts[0]:
            raise UserError(f"{checkpoint.folder}: its tokenizer.json differs from that of {opened[0].folder}")
    weights = averaged(opened)
    first = opened[0]
    own = files_with_weights(read_settings(first.folder, first.config), first.folder)
    return save_checkpoint(output, first.config, weights, texts[0], **own)
