"""Small checkpoints quantised by MLX, in every number of bits and size of group."""

from small_models import random_weights

from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.quantization import BITS, GROUP_SIZES, Scheme

SCHEMES = [Scheme(group, bits) for bits in BITS for group in GROUP_SIZES]
NAMES = [f"{s.bits} bits, groups of {s.group_size}" for s in SCHEMES]
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
            save_checkpoint(plain, wide(**changes), random_weights(wide(**changes)))
        out = folder / "-".join([str(scheme.bits), str(scheme.group_size), *map(str, changes.values())])
        if not out.exists():
            quantize_checkpoint(plain, out, scheme)
        return out

    return made
