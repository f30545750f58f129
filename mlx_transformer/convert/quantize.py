"""Quantise a checkpoint: store its matrices as integers, with a scale and a bias per group."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlx_transformer.core.checkpoint import CHECKPOINT, WEIGHTS, open_checkpoint, resolve, save_checkpoint
from mlx_transformer.core.outputs import claim
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.quantization import Scheme, described
from mlx_transformer.generation.settings import files_with_weights
from mlx_transformer.nn import Transformer as Network
from mlx_transformer.nn.quantize import check_runs, quantization_of, use_quantized_layers
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.durable import Target
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.progress import Progress, no_progress
from mlx_transformer.text.tokenizer import checked_tokenizer

READ, ROUNDED = 0.3, 0.7
"""Progress shown when the checkpoint has been read, and when it has been quantised; roughly the shares of the time."""


def quantize(model: Network, scheme: Scheme) -> None:
    """Quantise in place every linear map and embedding whose width is a multiple of the group size.

    Raises `UserError` if there is none, or if the model is quantised already.
    """
    if quantization_of(model):
        raise UserError("the model is quantised already; quantise the one that it was made from")
    check_runs(scheme)
    shapes = quantizable_shapes(model.config)
    chosen = {name: scheme for name, shape in shapes.items() if scheme.divides(shape)}
    if not chosen:
        widths = ", ".join(map(str, sorted({width for _, width in shapes.values()})))
        raise UserError(f"no matrix (widths {widths}) has groups of {scheme.group_size}: choose a smaller group size")
    use_quantized_layers(model, chosen)


def quantize_checkpoint(
    folder: str | Path, out: Target, scheme: Scheme, force: bool = False, watch: Progress = no_progress
) -> str:
    """Write a quantised copy of a checkpoint, with its tokenizer; return a summary for people.

    out: new or empty, or with `force` another checkpoint, which is replaced. watch: called with the finished share and
    the current step, e.g. watch(0, "reading"). Raises `UserError` for a damaged or already quantised checkpoint, or if
    `out` is the checkpoint itself.
    """
    output = claim(out, CHECKPOINT, force, resolve(folder))
    watch(0, "reading")
    checkpoint = open_checkpoint(folder)
    if checkpoint.quantization:
        raise UserError(f"{folder}: is quantised already; quantise the checkpoint that it was made from")
    text, shapes = checked_tokenizer(checkpoint), quantizable_shapes(checkpoint.config)
    model = Transformer.load(checkpoint.folder)
    # From lower precisions -bias / scale isn't whole, but fast kernels need zero points.
    for path, module in model.named_modules():
        if f"{path}.weight" in shapes and scheme.divides(shapes[f"{path}.weight"]):
            module.weight = module.weight.astype(mx.float32)
    quantize(model, scheme)
    quantization = quantization_of(model)
    layers = dict(model.named_modules())
    for done, path in enumerate(quantization):
        watch(READ + (ROUNDED - READ) * done / len(quantization), path)
        mx.eval(layers[path.removesuffix(".weight")].parameters())  # MLX is lazy: quantise this layer now
    watch(ROUNDED, "writing")
    own = files_with_weights(model.generation, checkpoint.folder)
    save_checkpoint(output, model.config, model.weights(), text, quantization=quantization, **own)
    watch(1, "written")
    sizes = [(path / WEIGHTS).stat().st_size / 1e6 for path in (checkpoint.folder, Path(out))]
    return f"{described(quantization, shapes)}; {sizes[0]:.1f} MB became {sizes[1]:.1f} MB"
