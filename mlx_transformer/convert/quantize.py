"""Quantise a checkpoint: store its matrices as integers, with a scale and a bias per group.

    nearest        each number to its nearest integer, as MLX does search         without data: the best of several
    ranges for each group, by squared error gptq           from the second moments of the inputs (Frantar et al. 2023):
    rounds a column at a time, and adapts the remaining columns so that the outputs change least. Columns with large
    inputs come first. Groups are neighbours in a row; their scales are chosen before, as in search, with errors
    weighted by the inputs' squares

Groups of search and gptq are w ~ scale * (q - zero), with a whole zero in q's range, as fast kernels need it.
Embeddings and classifier have 8 bits there, as in the precision int4 of `export`.

The text's even lines calibrate, and on its odd lines the quantised model is compared with the original, token by token.

Shapes: O rows, D columns, G groups of b columns in a row.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.checkpoint import CHECKPOINT, WEIGHTS, Checkpoint, open_checkpoint, save_checkpoint
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.parameters import embedding_names, output_weight_name, quantizable_shapes
from mlx_transformer.core.quantization import Packed, Quantization, Scheme, described, packed_words
from mlx_transformer.families.conversion import as_checkpoint, folder_of
from mlx_transformer.generation.likelihood import Divergence, divergence
from mlx_transformer.generation.settings import files_with_weights, read_settings
from mlx_transformer.nn import Transformer as Network
from mlx_transformer.nn.quantize import as_mlx, check_runs, quantization_of, quantized, use_quantized_layers
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.durable import Output, Target
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.progress import Progress, no_progress
from mlx_transformer.text.tokenizer import checked_tokenizer

from .calibrate import Example, cut, logits_of, moments, read_examples

Array = NDArray[np.float32]

ROWS = 256
"""Rows whose scales are chosen at a time."""
COLUMNS = 64
"""Columns that GPTQ rounds before it adapts the remaining columns."""
DAMPING = 0.01
"""Added to the moments' diagonal, as a share of its mean."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Ranges tried for a group, as shares of the range from its smallest to its largest number."""


def searched(w: Array, scheme: Scheme) -> Packed:
    """Quantise w (O, D) by the method search."""
    scales, zeros = grid(w, scheme)
    q = np.empty(w.shape, np.uint8)
    for rows, grouped in _in_groups(w, scheme):
        nearest = np.rint(grouped / scales[rows, :, None]) + zeros[rows, :, None]
        q[rows] = np.clip(nearest, 0, 2**scheme.bits - 1).reshape(len(grouped), -1)
    return _packed(q, scales, zeros, scheme)


def gptq(w: Array, moments: Array, scheme: Scheme) -> Packed:
    """Quantise w (O, D) by GPTQ. moments (D, D): the sum of x x^T over the inputs x (D,). Rows are independent.

    Raises `numpy.linalg.LinAlgError` for moments that aren't finite.
    """
    weight = np.maximum(np.diag(moments), DAMPING * np.diag(moments).mean())
    scales, zeros = grid(w, scheme, weight)
    order, factor = _factor(moments)
    top, by_group = np.float32(2**scheme.bits - 1), (np.ascontiguousarray(each.T) for each in (scales, zeros))
    steps, middle = by_group  # (G, O)
    left = np.ascontiguousarray(w.T[order])  # (D, O)
    q = np.empty(w.shape[::-1], np.uint8)
    for begin in range(0, len(left), COLUMNS):
        end = min(begin + COLUMNS, len(left))
        errors = np.empty((end - begin, len(w)), np.float32)
        for i in range(begin, end):
            step, zero = steps[group := order[i] // scheme.group_size], middle[group]
            integers = np.clip(np.rint(left[i] / step + zero), 0, top)
            q[order[i]] = integers
            error = errors[i - begin] = (left[i] - step * (integers - zero)) / factor[i, i]
            left[i + 1 : end] -= factor[i, i + 1 : end, None] * error
        left[end:] -= factor[begin:end, end:].T @ errors
    return _packed(np.ascontiguousarray(q.T), scales, zeros, scheme)


def _factor(moments: Array) -> tuple[NDArray[np.intp], Array]:
    """(order of the columns, largest inputs first; upper Cholesky factor U of the inverse in this order: H^-1 = U^T
    U)"""
    h, size = moments.astype(np.float64), np.diag(moments)
    order = np.argsort(-size, kind="stable")
    h = h[order][:, order]
    h[np.diag_indices(len(h))] += DAMPING * size.mean() or 1
    inverse = np.linalg.inv(np.linalg.cholesky(h[::-1, ::-1]))[::-1, ::-1]
    return order, np.triu(inverse).astype(np.float32)


def grid(w: Array, scheme: Scheme, weight: Array | None = None) -> tuple[Array, Array]:
    """Scales and whole zeros (O, G) with the smallest squared error among `SHRINKS`. weight (D,): of each column's
    errors."""
    shape = len(w), w.shape[1] // scheme.group_size
    scales, zeros = np.empty(shape, np.float32), np.empty(shape, np.float32)
    top = np.float32(2**scheme.bits - 1)
    h = 1 if weight is None else (weight / weight.mean()).reshape(shape[1], -1).astype(np.float32)  # (G, b)
    for rows, grouped in _in_groups(w, scheme):
        low, high = (np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0))
        span = np.where(high > low, high - low, top)[..., None]
        least = np.full(span.shape, np.inf, np.float32)
        best_scale, best_zero = span / top, np.zeros_like(span)
        for shrink in SHRINKS:
            scale = span * np.float32(shrink) / top
            zero = np.clip(np.rint(-low[..., None] * np.float32(shrink) / scale), 0, top)
            for _ in range(2):
                q = np.clip(np.rint(grouped / scale) + zero, 0, top) - zero
                error = (np.square(q * scale - grouped) * h).sum(-1, keepdims=True)
                better = error < least
                least, best_scale = np.where(better, error, least), np.where(better, scale, best_scale)
                best_zero = np.where(better, zero, best_zero)
                fitted, size = ((q * other * h).sum(-1, keepdims=True) for other in (grouped, q))
                scale = np.where((fitted > 0) & (size > 0), fitted / np.where(size > 0, size, 1), scale)
        scales[rows], zeros[rows] = best_scale[..., 0], best_zero[..., 0]
    return scales, zeros


def _in_groups(w: Array, scheme: Scheme) -> Iterator[tuple[slice, Array]]:
    for begin in range(0, len(w), ROWS):
        part = w[begin : begin + ROWS]
        yield slice(begin, begin + ROWS), part.reshape(len(part), -1, scheme.group_size)


def _packed(q: NDArray[np.uint8], scales: Array, zeros: Array, scheme: Scheme) -> Packed:
    return Packed(packed_words(q, scheme.bits), scales, -scales * zeros, scheme)


READ, ROUNDED, JUDGED = 0.1, 0.8, 0.95
"""Progress shown when the checkpoint has been read, quantised and judged; roughly the shares of the time."""
LARGEST_KL = 0.2
"""Largest divergence from the original model that is accepted without `accept_loss`."""
SENSED = 1024
"""Most tokens of the text to find the matrices that matter most."""
MOST_BITS = 8

Method = Literal["nearest", "search", "gptq"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How to choose integers. bits: their mean, if the matrices that matter most get more bits than others.

    Raises `UserError` if `method` or `bits` need a text and there is none.
    """

    method: Method = "nearest"
    text: str | Path | None = None
    bits: float | None = None
    accept_loss: bool = False

    def __post_init__(self) -> None:
        if self.text is None and (self.method == "gptq" or self.bits is not None):
            what = "method gptq" if self.bits is None else f"a mean of {self.bits:g} bits"
            raise UserError("{}: needs text like the model's later input: give some with {text}", what)


def quantize(model: Network, scheme: Scheme) -> None:
    """Quantise in place every linear map and embedding whose width is a multiple of the group size, to nearest.

    Raises `UserError` if there is none, or if the model is quantised already.
    """
    if quantization_of(model):
        raise UserError("the model is quantised already; quantise the original")
    use_quantized_layers(model, _divided(quantizable_shapes(model.config), scheme))


def quantize_checkpoint(
    folder: str | Path,
    out: Target,
    scheme: Scheme,
    force: bool = False,
    watch: Progress = no_progress,
    how: Calibration = Calibration(),
) -> str:
    """Write a quantised copy of a checkpoint, with its tokenizer; return a summary for people.

    Linear maps and embeddings are quantised if their width is a multiple of the group size. folder: a checkpoint or a
    published model. out: new or empty; with `force` it may be another checkpoint, which is replaced. watch: called with
    the finished share and the current step, e.g. watch(0, "reading"). Raises `UserError` for a damaged or quantised
    checkpoint, if `out` is the checkpoint itself, if no width fits, and if the divergence on `how.text` exceeds
    `LARGEST_KL`.
    """
    output = claim(out, CHECKPOINT, force, folder_of(folder), *([] if how.text is None else [Path(how.text)]))
    watch(0, "reading")
    with as_checkpoint(folder) as made:
        checkpoint = open_checkpoint(made)
        if checkpoint.quantization:
            command = f"mlx-transformer quantize {shlex.quote(str(folder))} FLOATS --dequantize"
            raise UserError(f"{folder}: is quantised already; quantise the original, or make floats of it: {command}")
        return _quantized(checkpoint, output, scheme, watch, how)


def dequantize_checkpoint(folder: str | Path, out: Target, force: bool = False) -> str:
    """Write a quantised checkpoint, or a published model, with float32 matrices; an adapter beside it is merged."""
    output = claim(out, CHECKPOINT, force, folder_of(folder))
    with as_checkpoint(folder) as made:
        checkpoint = open_checkpoint(made)
        if not checkpoint.quantization:
            raise UserError(f"{folder}: isn't quantised: it needs no --dequantize")
        own = files_with_weights(read_settings(checkpoint.folder, checkpoint.config), checkpoint.folder)
        weights: Any = checkpoint.unread()
        save_checkpoint(output, checkpoint.config, weights, checked_tokenizer(checkpoint), **own)
        return f"{len(checkpoint.quantization)} matrices in float32; {_sizes(checkpoint, output)}"


def _sizes(checkpoint: Checkpoint, output: Output) -> str:
    before, after = ((folder / WEIGHTS).stat().st_size / 1e6 for folder in (checkpoint.folder, output.path))
    return f"{before:.1f} MB became {after:.1f} MB"


def _quantized(checkpoint: Checkpoint, output: Output, scheme: Scheme, watch: Progress, how: Calibration) -> str:
    if not scheme.affine and (how.method, how.bits) != ("nearest", None):
        raise UserError(f"mode {scheme.mode}: only method nearest; other methods and mixed bits are for mode affine")
    text, shapes = checked_tokenizer(checkpoint), quantizable_shapes(checkpoint.config)
    chosen = _divided(shapes, scheme)
    if how.method != "nearest" and how.bits is None:
        tables = embedding_names(checkpoint.config) | {output_weight_name(checkpoint.config)}
        chosen |= {name: replace(scheme, bits=MOST_BITS) for name in tables & chosen.keys()}
    model = Transformer.load(checkpoint.folder)
    modules = dict(model.named_modules())
    if how.text is not None:  # the model runs
        for name in chosen:
            layer = modules[name.removesuffix(".weight")]
            layer.weight = layer.weight.astype(mx.float32)
    calibrating, judging = ([], []) if how.text is None else read_examples(model, how.text)
    if how.bits is not None:
        chosen = _mixed(model, chosen, how.bits, calibrating, watch)
    rounded: dict[str, Packed] = {}
    for name, packed in _rounded(model, chosen, how.method, calibrating):
        watch(READ + (ROUNDED - READ) * len(rounded) / len(chosen), name)
        rounded[name], layer = packed, modules[name.removesuffix(".weight")]
        if judging:
            layer.weight = mx.array(packed.dequantised())
        elif how.text is None:  # takes no memory until it is computed, which it never is
            layer.weight = mx.zeros(layer.weight.shape)
            mx.clear_cache()
    lost = _lost(Transformer.load(checkpoint.folder), model, judging, watch) if judging else None
    if lost is not None and lost.kl > LARGEST_KL and not how.accept_loss:
        what = f"{how.text}: {lost}: the limit is KL {LARGEST_KL}"
        raise UserError("{}; take more bits, smaller groups or method gptq, or {accept_loss}", what)
    watch(JUDGED, "writing")
    put_integers(model, rounded)
    own = files_with_weights(model.generation, checkpoint.folder)
    save_checkpoint(output, model.config, model.weights(), text, quantization=quantization_of(model), **own)
    watch(1, "written")
    about = f"{described(chosen, shapes)}; {_sizes(checkpoint, output)}"
    return about if lost is None else f"{about}; on other lines of {Path(str(how.text)).name}: {lost}"


def _divided(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> dict[str, Scheme]:
    """{matrix: scheme} of the matrices whose width is a multiple of the group size. Raises `UserError` if there is
    none."""
    check_runs(scheme)
    chosen = {name: scheme for name, shape in shapes.items() if scheme.divides(shape)}
    if not chosen:
        widths = ", ".join(map(str, sorted({width for _, width in shapes.values()})))
        raise UserError(f"no matrix (widths {widths}) has groups of {scheme.group_size}: choose a smaller group size")
    return chosen


def _rounded(
    model: Transformer, chosen: Quantization, method: Method, examples: Sequence[Example]
) -> Iterator[tuple[str, Packed]]:
    """Yield (name, integers) of each matrix. The caller may put the integers into the model before the next."""
    modules: dict[str, Any] = dict(model.named_modules())

    def weight(name: str) -> Array:
        return np.array(modules[name.removesuffix(".weight")].weight.astype(mx.float32))

    left = dict(chosen)
    if method == "gptq":
        paths = [name.removesuffix(".weight") for name in chosen if name not in embedding_names(model.config)]
        for readers, sums in moments(model, paths, examples):
            names = [f"{path}.weight" for path in readers]
            for scheme in {left[name]: None for name in names}:
                some = [name for name in names if left.get(name) == scheme]
                rows = [weight(name) for name in some]
                whole, begin = gptq(np.concatenate(rows), sums, scheme), 0
                for name, part in zip(some, rows, strict=True):
                    yield name, whole[begin : (begin := begin + len(part))]
                    del left[name]
    for name, scheme in left.items():
        nearest = partial(quantized, modules[name.removesuffix(".weight")].weight)
        yield name, nearest(scheme) if method == "nearest" else searched(weight(name), scheme)


def _mixed(
    model: Transformer, chosen: Quantization, bits: float, examples: Sequence[Example], watch: Progress
) -> dict[str, Scheme]:
    """Give twice the bits to the sub-layers and embeddings with the highest cost per weight, up to a mean of `bits`.
    The cost is the model's divergence if only they are quantised."""
    shapes, modules = quantizable_shapes(model.config), dict(model.named_modules())
    size = {name: int(np.prod(shapes[name])) for name in chosen}
    parts: dict[str, list[str]] = {}
    for name in chosen:
        parts.setdefault(".".join(name.split(".")[:4]), []).append(name)
    some = [(example, example.labels) for example in cut(examples, SENSED)]
    if not all(labels for _, labels in some):
        raise UserError(f"a mean of {bits:g} bits: only for models with a decoder; give a whole number of bits")
    wide = {id(example): logits_of(model, example) for example, _ in some}
    cost: dict[str, float] = {}
    for done, (part, names) in enumerate(parts.items()):
        watch(READ * done / len(parts), f"{part} alone")
        layers = {name: modules[name.removesuffix(".weight")] for name in names}
        plain = {name: layer.weight for name, layer in layers.items()}
        for name, layer in layers.items():
            layer.weight = mx.array(quantized(np.array(layer.weight), chosen[name]).dequantised())
        lost = divergence(lambda example: (wide[id(example)], logits_of(model, example)), some)
        cost[part] = lost.kl / sum(size[name] for name in names)
        for name, layer in layers.items():
            layer.weight = plain[name]
    mixed, left = dict(chosen), bits * sum(size.values()) - sum(s.bits * size[name] for name, s in chosen.items())
    for part in sorted(parts, key=lambda part: -cost[part]):
        for name in parts[part]:
            more = min(2 * mixed[name].bits, MOST_BITS)
            if (needed := (more - mixed[name].bits) * size[name]) <= left:
                mixed[name], left = replace(mixed[name], bits=more), left - needed
    return mixed


def _lost(wide: Transformer, model: Transformer, judging: Sequence[Example], watch: Progress) -> Divergence | None:
    """The divergence of the quantised model from the original; None without examples with labels."""
    texts = [(example, example.labels) for example in judging if example.labels]
    if not texts:
        return None
    return divergence(
        lambda example: (logits_of(wide, example), logits_of(model, example)),
        texts,
        lambda share: watch(ROUNDED + (JUDGED - ROUNDED) * share, "judging"),
    )


def put_integers(model: Network, rounded: Mapping[str, Packed]) -> None:
    """Replace each module whose weight is in `rounded` by MLX's quantised module with these integers."""
    use_quantized_layers(model, {name: packed.scheme for name, packed in rounded.items()})
    modules: dict[str, Any] = dict(model.named_modules())
    for name, packed in rounded.items():
        for part, array in packed.tensors(".weight").items():
            modules[name.removesuffix(".weight")][part.removeprefix(".")] = as_mlx(array)
