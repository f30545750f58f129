"""The floating-point operations of a step, and those that the device could do: their share is how well it is used."""

from __future__ import annotations

import time
from collections.abc import Iterator

import mlx.core as mx

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import output_weight_name, parameter_shapes
from mlx_transformer.data.epochs import TrainingBatch
from mlx_transformer.device import cpu_streams, device_kind

from .step import Arithmetic

GRADIENT = 3  # times the forward pass: each product has two more in its gradient
READ_SOURCE = (".cross_attention.key_proj.", ".cross_attention.value_proj.")  # of a decoder's maps


class Work:
    """Counts the floating-point operations of a model's steps.

    They are two for each weight that meets a token (Kaplan et al. 2020, section 2.1), and the products of queries, keys
    and values. A layer that is checkpointed counts once.
    """

    def __init__(self, config: TransformerConfig):
        self.config = config
        self.by_side = {"source": 0, "target": 0}
        for name, shape in parameter_shapes(config).items():
            side = name.partition(".")[0]
            if len(shape) == 2 and side in ("encoder", "decoder"):
                source = side == "encoder" or any(part in name for part in READ_SOURCE)
                self.by_side["source" if source else "target"] += shape[0] * shape[1]
        rows, columns = parameter_shapes(config)[output_weight_name(config)] if config.head.classifies else (0, 0)
        self.classifier = rows * columns

    def __call__(self, batch: TrainingBatch) -> float:
        """Count the operations for one batch, padding included, forward and backward."""
        targets, _, *inputs = batch.arrays(self.config.pad_id)
        stacks = {"source": self.config.has_encoder, "target": self.config.has_decoder}
        sides = [side for side, exists in stacks.items() if exists]
        sizes = dict(zip(sides, (ids.shape for ids in inputs if ids is not None), strict=False))
        assert targets is not None
        products = self.classifier * targets.size
        for side, (rows, length) in sizes.items():
            products += self.by_side[side] * rows * length
        return 2.0 * GRADIENT * (products + sum(self._attention(sizes)))

    def _attention(self, sizes: dict[str, tuple[int, ...]]) -> Iterator[int]:
        """Count the multiplications for the scores and weighted sums of all heads, stack by stack."""
        c = self.config
        stacks = {"source": c.layers("encoder"), "target": c.layers("decoder")}
        widths = {side: sum(c.heads * (c.d_k + c.d_v) for c in layers) for side, layers in stacks.items()}
        for side, width in widths.items():
            if side in sizes and not (side == "target" and c.recurrent):
                rows, length = sizes[side]
                yield width * rows * length * length
        if len(sizes) == 2:
            (rows, length), (_, target_length) = sizes["source"], sizes["target"]
            yield widths["target"] * rows * length * target_length


def peak_speed(arithmetic: Arithmetic) -> float:
    """Measure the operations a second that the device can do: the best of a few products of large square matrices."""
    size = 512 if device_kind() == "cpu" else 4096
    streams = cpu_streams()
    best = 0.0
    for _ in range(4):
        factors = [mx.ones((size, size), arithmetic.dtype) for _ in streams]
        mx.eval(factors)
        begin = time.perf_counter()
        mx.eval([mx.matmul(a, a, stream=stream) for a, stream in zip(factors, streams, strict=True)])
        best = max(best, 2 * size**3 * len(streams) / (time.perf_counter() - begin))
    return best
