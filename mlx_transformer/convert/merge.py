"""Make one checkpoint of an adapter and its base: merged, merged and requantised, or side by side."""

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
    save_checkpoint,
    weights_digest,
)
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import Place
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.quantization import Packed, packed_words
from mlx_transformer.core.tokenizer_files import NAMES
from mlx_transformer.families.conversion import adapter_of, as_checkpoint, folder_of, with_peft
from mlx_transformer.generation.settings import SETTINGS, files_with_weights, read_settings
from mlx_transformer.nn.quantize import as_numpy, quantized
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.durable import Output, Target, replace_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import CARD, write_manifest
from mlx_transformer.system.tensors import to_float32
from mlx_transformer.text.tokenizer import checked_tokenizer

ROWS, LENGTH = 4, 16
"""Number and length of the random sequences of ids on which two models' logits are compared."""

Weights = dict[str, NDArray]


@dataclass(frozen=True)
class Rounding:
    """Error of requantising the merged matrices. rms: root mean square."""

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
        lost = "; rounding took most of the change back: --keep-adapter keeps it" * (self.error > self.change / 2)
        return (
            f"{self.matrices} matrices rounded again: relative rms error {self.error:.2%}, where the adapter had "
            f"changed them by {self.change:.2%}; logits of {ROWS} random sequences differ by at most {self.logits:.3g} "
            f"(their standard deviation is {self.spread:.3g}){lost}"
        )


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: Target,
    requantize: bool = False,
    force: bool = False,
    widen: bool = False,
) -> Rounding | None:
    """Merge an adapter into its base; write a checkpoint with tokenizer.

    Each matrix keeps the base's type, but a quantised matrix becomes float32; it is rounded once.

    base: a checkpoint, or a published model's folder. adapter: ours, PEFT's or mlx-lm's. widen: store all in float32.
    requantize: quantise merged matrices with the base's schemes, and return the error; the other quantised matrices
    keep their integers. out: new or empty; with `force` it may be a checkpoint, which is replaced.
    Raises `UserError` if the adapter is damaged or was trained from other weights.
    """
    output = _claimed(base, adapter, out, force)
    with as_checkpoint(base) as folder:
        opened = open_checkpoint(folder).base
        opened = opened.widened() if widen else opened
        text = checked_tokenizer(opened)
        config, merged, changed = _merged(opened, Path(adapter))
        own = files_with_weights(read_settings(opened.folder, opened.config), opened.folder)
        if not requantize:
            save_checkpoint(output, config, merged, text, **own)
            return None
        if changed.isdisjoint(opened.quantization):
            raise _none_quantised(opened, "none can be rounded again: leave out --requantize")
        stored, rounded = _rounded(opened, changed, merged)
        save_checkpoint(output, config, stored, text, quantization=opened.quantization, **own)
        was = {name: opened.tensor(name) for name in rounded}
    exact = {name: merged[name] for name in rounded}
    models = [
        Transformer.from_weights(config, merged),
        Transformer.from_weights(config, stored, opened.quantization),
    ]
    logits, others = (_logits(model, config) for model in models)
    size = _rms(exact)
    error, change = (_rms({n: other[n] - exact[n] for n in exact}) / size for other in (rounded, was))
    return Rounding(len(exact), error, change, float(np.abs(logits - others).max()), float(logits.std()))


def keep_adapter(base: str | Path, adapter: str | Path, out: Target, force: bool = False) -> str:
    """Write a checkpoint of a quantised base with the adapter beside it: bit for bit the model that was trained.

    base, adapter: as for `merge_adapter`; an adapter of PEFT or mlx-lm must change only linear maps of the layers.

    Returns a description, e.g. "lora of rank 8 beside 12 matrices of integers: 5.1 MB and 0.2 MB". `out` and errors: as
    for `merge_adapter`; also `UserError` if the adapter changes no quantised matrix.
    """
    output = _claimed(base, adapter, out, force)
    with as_checkpoint(base) as folder:
        opened = open_checkpoint(folder).base
        change = _fitting(opened, Path(adapter))
        checked_tokenizer(opened)  # raises UserError if it is damaged
        together = replace(opened, adapter=change)
        if not together.adapted_integers:
            raise _none_quantised(opened, "merging it rounds nothing: leave out --keep-adapter")
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


def _claimed(base: str | Path, adapter: str | Path, out: Target, force: bool) -> Output:
    return claim(out, CHECKPOINT, force, folder_of(base), Path(adapter))


def _fitting(base: Checkpoint, path: Path) -> Adapter:
    """Read an adapter; check that it fits this base, and that an adapter of ours was trained from it."""
    digest = weights_digest(base.folder)
    if Place.of(path).what == "a published adapter":
        change = adapter_of(path, base.config, digest)
    else:
        change = read_adapter(path)
        change.check_base(base.folder, digest, str(path))
    change.check_fits(base.config, str(path))
    return change


def _merged(base: Checkpoint, path: Path) -> tuple[TransformerConfig, Weights, set[str]]:
    """The merged config, the merged weights, and the names of the changed matrices."""
    if Place.of(path).what == "a published adapter":
        config, weights = with_peft(path, base.config, dict(base.tensors()), base.folder)
        return config, weights, {n for n in base.quantization if not np.array_equal(weights[n], base.tensor(n))}
    change = _fitting(base, path)
    weights = {name: change.merged(name, weight) for name, weight in base.tensors()}
    return base.config, weights, {f"{path}.weight" for path in change.config.targets}


def _none_quantised(checkpoint: Checkpoint, advice: str) -> UserError:
    return UserError(f"{checkpoint.folder}: no matrix that the adapter changes is quantised; {advice}")


def _rounded(base: Checkpoint, changed: set[str], merged: Weights) -> tuple[Weights, Weights]:
    """(all tensors to store, the dequantised values of the requantised matrices)"""
    integers = changed & base.quantization.keys()
    kept = {part for name, scheme in base.quantization.items() if name not in integers for part in scheme.tensors(name)}
    stored = {name: array for name, array in base.stored() if name in kept}
    stored |= {name: array for name, array in merged.items() if name not in base.quantization}
    values = Weights()
    for name in sorted(integers):
        scheme = base.quantization[name]
        before = base.matrices()[name].read()
        packed = quantized(merged[name].astype(before.scales.dtype if scheme.affine else np.float32), scheme)
        packed = _nearer(before, packed, merged[name]) if scheme.affine else packed
        stored |= packed.tensors(name)
        values[name] = packed.widened().dequantised()
    return stored, values


def _nearer(before: Packed, fresh: Packed, w: NDArray) -> Packed:
    """Quantise w (O, D), each group with its old scale and bias or with new ones, by the smaller error.

    Old scales keep the integers of a matrix that the adapter hardly changes.
    """
    scheme, shape = before.scheme, (len(w), -1, before.scheme.group_size)
    scales, biases = (to_float32(part)[..., None] for part in before.parts[1:])
    steps = (w.reshape(shape) - biases) / np.where(scales == 0, 1, scales)
    q = np.clip(np.rint(steps), 0, 2**scheme.bits - 1).astype(np.uint8).reshape(w.shape)
    same = Packed(packed_words(q, scheme.bits), before.scales, before.biases, scheme)
    errors = [np.square(each.widened().dequantised() - w).reshape(shape).sum(-1) for each in (same, fresh)]
    nearer = errors[0] <= errors[1]  # (O, G)
    chosen = np.where(np.repeat(nearer, scheme.group_size, axis=1), q, fresh.integers())
    scales, biases = (np.where(nearer, *pair) for pair in zip(same.parts[1:], fresh.parts[1:], strict=True))
    return Packed(packed_words(chosen, scheme.bits), scales, biases, scheme)


def _logits(model: Transformer, config: TransformerConfig) -> NDArray:
    rng, shape = np.random.default_rng(0), (ROWS, min(LENGTH, config.max_positions))
    pair = config.architecture == "encoder-decoder"
    sizes = (config.source_vocab_size, config.vocab_size) if pair else (config.vocab_size,)
    return to_float32(as_numpy(model(*(rng.integers(0, size, shape) for size in sizes))))


def _rms(arrays: Weights) -> float:
    return float(np.sqrt(np.mean(np.concatenate([a.ravel() for a in arrays.values()]).astype(np.float64) ** 2)))
