"""Small checkpoints quantised by MLX, in every number of bits and size of group."""

import numpy as np
import pytest
from combined import combined
from runtimes import mlx_gpu
from small_models import random_weights

from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.quantization import BITS, GROUP_SIZES, SHORT_FLOATS, Packed, Scheme

SCHEMES = [Scheme(group, bits) for bits in BITS for group in GROUP_SIZES]
NAMES = [f"{s.bits} bits, groups of {s.group_size}" for s in SCHEMES]
EACH = [
    pytest.param(Scheme(group, bits), marks=marks, id=f"{bits} bits, groups of {group}")
    for (bits, group), marks in ((p.values, p.marks) for p in combined(BITS, GROUP_SIZES))
]
"""Parameters: the same, of which `make test` tries each number of bits and each size."""
SHORT = [pytest.param(Scheme(*sizes, mode), id=mode) for mode, sizes in SHORT_FLOATS.items()]
SMALL_GROUP = Scheme(16, 6)
ENCODER = dict(architecture="encoder", decoder_layers=0)


def wide(**changes) -> TransformerConfig:
    """Sizes that every group divides, but for the feed-forward's inner width of 96: only groups of 32 divide it."""
    sizes = dict(vocab_size=40, d_model=128, heads=2, d_ff=96, encoder_layers=1, decoder_layers=1, max_positions=24)
    return TransformerConfig(**{**sizes, **changes})


def quantized_models(tmp_path_factory):
    """A fixture: model(scheme, **changes of the config) -> folder of a quantised checkpoint, made once."""
    folder = tmp_path_factory.mktemp("quantised")

    def made(scheme: Scheme, **changes):
        plain = folder / "-".join(["plain", *map(str, changes.values())])
        if not plain.exists():
            save_checkpoint(plain, wide(**changes), random_weights(wide(**changes)), force=True)
        out = folder / "-".join([scheme.mode, str(scheme.bits), str(scheme.group_size), *map(str, changes.values())])
        if not out.exists() and scheme == SMALL_GROUP:
            in_small_groups(out, wide(**changes))
        elif not out.exists():
            quantize_checkpoint(plain, out, scheme)
        return out

    return made


def in_small_groups(out, config: TransformerConfig) -> None:
    """A checkpoint in groups of 16, which MLX can't make: random integers, zero points of 32, as GGUF's Q6_K has."""
    rng, weights = np.random.default_rng(7), random_weights(config)
    chosen = dict.fromkeys(quantizable_shapes(config), SMALL_GROUP)
    for name in chosen:
        rows, width = weights.pop(name).shape
        words = rng.integers(0, 2**32, (rows, width * SMALL_GROUP.bits // 32), np.uint32)
        scales = (rng.random((rows, width // 16), np.float32) + np.float32(0.5)) / 256
        weights |= Packed(words, scales, -32 * scales, SMALL_GROUP).tensors(name)
    save_checkpoint(out, config, weights, quantization=chosen)


def assert_values_of_mlx(got: np.ndarray, packed: Packed, name: str = "") -> None:
    """What `mx.dequantize` computed (O, D): a CPU's bits are those of two roundings; a GPU's fused multiply-add rounds
    some kernels' values once."""
    twice = packed.dequantised()
    if not mlx_gpu():
        np.testing.assert_array_equal(got, twice.astype(np.float32), err_msg=name)
        return
    grouped = packed.integers().reshape(*packed.scales.shape, -1).astype(np.float64)
    exact = grouped * packed.scales[..., None].astype(np.float64) + packed.biases[..., None].astype(np.float64)
    once = exact.astype(twice.dtype).reshape(twice.shape)
    one_of_both = np.where(got == twice.astype(np.float32), twice, once)
    np.testing.assert_array_equal(got, one_of_both.astype(np.float32), err_msg=name)
