"""Make one checkpoint of an adapter and its base: merged in float32, merged and quantised again, or side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.adapter import ARRAYS, Adapter, read_adapter
from mlx_transformer.core.card import carried, write_card
from mlx_transformer.core.checkpoint import (
    CHECKPOINT,
    CONFIG,
    WEIGHTS,
    Checkpoint,
    open_checkpoint,
    resolve,
    save_checkpoint,
    weights_digest,
)
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.tokenizer_files import NAMES
from mlx_transformer.generation.settings import SETTINGS, files_with_weights, read_settings
from mlx_transformer.nn.quantize import quantized
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.durable import Output, Target, replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import CARD, write_manifest
from mlx_transformer.text.tokenizer import checked_tokenizer

ROWS, LENGTH = 4, 16
"""Number and length of the random sequences of ids on which two models' logits are compared."""

Weights = dict[str, NDArray]


@dataclass(frozen=True)
class Rounding:
    """The cost of quantising the merged matrices again. rms: root mean square."""

    matrices: int
    error: float
    """rms of the rounding errors / rms of the merged weights."""
    change: float
    """rms of the adapter's change / rms of the merged weights."""
    logits: float
    """Largest difference of a logit on `ROWS` random sequences."""
    spread: float
    """Standard deviation of the logits."""

    def __str__(self) -> str:
        return (
            f"{self.matrices} matrices rounded again: relative rms error {self.error:.2%}, where the adapter had "
            f"changed them by {self.change:.2%}; logits of {ROWS} random sequences differ by at most {self.logits:.3g} "
            f"(their standard deviation is {self.spread:.3g})"
        )


def merge_adapter(
    base: str | Path, adapter: str | Path, out: Target, requantize: bool = False, force: bool = False
) -> Rounding | None:
    """Merge an adapter into its base; write a checkpoint with tokenizer, in float32 even if the base is quantised.

    requantize: quantise merged matrices again if they are quantised in the base, by the same schemes, and return the
    cost. Quantised matrices without an adapter keep their integers.
    out: new or empty, or with `force` another checkpoint, which is replaced. Raises `UserError` if the adapter is
    damaged or was trained from other weights.
    """
    output, opened, delta = _opened(base, adapter, out, force)
    text = checked_tokenizer(opened)
    merged = {name: delta.merged(name, weight) for name, weight in opened.tensors()}
    own = files_with_weights(read_settings(opened.folder, opened.config), opened.folder)
    if not requantize:
        save_checkpoint(output, opened.config, merged, text, **own)
        return None
    _check_quantised(replace(opened, adapter=delta), "none can be rounded again: leave out --requantize")
    stored, rounded = _rounded(opened, delta, merged)
    save_checkpoint(output, opened.config, stored, text, quantization=opened.quantization, **own)
    was = {name: opened.tensor(name) for name in rounded}
    exact = {name: merged[name] for name in rounded}
    models = [
        Transformer.from_weights(opened.config, merged),
        Transformer.from_weights(opened.config, stored, opened.quantization),
    ]
    logits, others = (_logits(model, opened.config) for model in models)
    size = _rms(exact)
    error, change = (_rms({n: other[n] - exact[n] for n in exact}) / size for other in (rounded, was))
    return Rounding(len(exact), error, change, float(np.abs(logits - others).max()), float(logits.std()))


def keep_adapter(base: str | Path, adapter: str | Path, out: Target, force: bool = False) -> str:
    """Write a checkpoint of a quantised base with the adapter beside it: bit for bit the model that was trained.

    Returns a description, e.g. "lora of rank 8 beside 12 matrices of integers: 5.1 MB and 0.2 MB". `out` and errors: as
    for `merge_adapter`; also `UserError` if the adapter changes no quantised matrix.
    """
    output, opened, change = _opened(base, adapter, out, force)
    checked_tokenizer(opened)  # raises UserError if it is damaged
    together = replace(opened, adapter=change)
    _check_quantised(together, "merging it rounds nothing: leave out --keep-adapter")
    with replace_folder(output) as temporary:
        beside = files_with_weights(read_settings(opened.folder, opened.config), opened.folder)["texts"]
        for name in (CONFIG, WEIGHTS, *NAMES, *(beside.keys() | {SETTINGS}) - {CARD}):
            if (opened.folder / name).is_file():
                copyfile(opened.folder / name, temporary / name)
        change.save(temporary)
        write_card(temporary, opened.config, begin=carried(opened.folder), replaced=output.path)
        write_manifest(temporary)
    sizes = [Path(out) / name for name in (WEIGHTS, ARRAYS)]
    megabytes = " and ".join(f"{path.stat().st_size / 1e6:.1f} MB" for path in sizes)
    integers = len(together.adapted_integers)
    return f"{change.config.kind} of rank {change.config.rank} beside {integers} matrices of integers: {megabytes}"


def _opened(base: str | Path, adapter: str | Path, out: Target, force: bool) -> tuple[Output, Checkpoint, Adapter]:
    """Claim `out`; open the base (without an adapter of its own) and the adapter, and check that they fit."""
    output = claim(out, CHECKPOINT, force, resolve(base), Path(adapter))
    opened = open_checkpoint(base).base
    change = read_adapter(adapter)
    if change.config.base != (digest := weights_digest(opened.folder)):
        raise UserError(
            f"{adapter}: belongs to weights of SHA-256 {change.config.base[:12]}..., those of {opened.folder} have "
            f"{digest[:12]}...; give the checkpoint that it was trained from"
        )
    change.check_fits(opened.config, str(adapter))
    return output, opened, change


def _check_quantised(checkpoint: Checkpoint, advice: str) -> None:
    if not checkpoint.adapted_integers:
        raise UserError(f"{checkpoint.folder}: no matrix that the adapter changes is quantised; {advice}")


def _rounded(base: Checkpoint, adapter: Adapter, merged: Weights) -> tuple[Weights, Weights]:
    """(all tensors to store, the dequantised values of the matrices that were quantised again)"""
    stored, values = dict(base.stored()), Weights()
    for path in adapter.config.targets:
        name = f"{path}.weight"
        if name not in base.quantization:
            stored[name] = merged[name]
            continue
        scheme = base.quantization[name]
        packed = quantized(merged[name], scheme)
        stored |= packed.tensors(name)
        values[name] = packed.dequantised()
    return stored, values


def _logits(model: Transformer, config: TransformerConfig) -> NDArray:
    rng, shape = np.random.default_rng(0), (ROWS, min(LENGTH, config.max_positions))
    pair = config.architecture == "encoder-decoder"
    sizes = (config.source_vocab_size, config.vocab_size) if pair else (config.vocab_size,)
    return np.array(model(*(rng.integers(0, size, shape) for size in sizes)))


def _rms(arrays: Weights) -> float:
    return float(np.sqrt(np.mean(np.concatenate([a.ravel() for a in arrays.values()]).astype(np.float64) ** 2)))
