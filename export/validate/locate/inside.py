"""The points inside the sub-layers, the same names on all sides, and the operation that each one is the result of.

attention       query_proj key_proj value_proj [query_norm key_norm] queries keys values scores weights context, then
                the tap itself
SSRU            input_proj forget_proj states state (the last, which is kept), then the tap itself
feed-forward    up_proj gate_proj inner, then the tap itself
around each     X.residual (the sum), X_norm (the norm of sub-layer X)
embedding       rows scaled, then the tap itself, and that of its norm where there is one

A point that belongs to keys or values has a name that begins so: in cross-attention it has the source's positions.

A point is judged on the reference's own inputs: all points before it are replaced by the reference's values, so what is
wrong at a point was done wrong there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from export.validate.cases import Case
from mlx_transformer.core.config import SINUSOIDS, TransformerConfig

Array = NDArray

OPERATIONS = {
    "rows": "embedding row",
    "scaled": "embedding scale",
    "query_proj": "query projection",
    "key_proj": "key projection",
    "value_proj": "value projection",
    "query_norm": "RMS norm of each head's queries",
    "key_norm": "RMS norm of each head's keys",
    "queries": "queries: heads split, rotary positions",
    "keys": "keys: heads split, rotary positions, earlier keys from the cache",
    "values": "values: heads split, earlier values from the cache",
    "scores": "scores: Q K^T / sqrt(d_k)",
    "weights": "mask and softmax",
    "context": "weights times values, heads merged",
    "input_proj": "input projection",
    "forget_proj": "forget projection",
    "states": "states: f c + (1 - f) u, f the sigmoid of the forget projection",
    "state": "the state that is kept: that of the last position, before the ReLU",
    "self_attention": "output projection",
    "cross_attention": "output projection",
    "up_proj": "up projection",
    "gate_proj": "gate projection",
    "inner": "activation",
    "feed_forward": "down projection",
    "residual": "residual connection",
    "head_proj": "dense layer of the head",
    "logits": "classifier",
}


HEADS = ("queries", "keys", "values")
"""The input of the attention itself, no module."""


def operation(point: str, config: TransformerConfig) -> str:
    """Say in words what makes this point out of those before it."""
    last = point.rpartition(".")[2]
    if last == "scores" and (scale := config.at(point).attention_scale) is not None:
        return f"scores: Q K^T times {scale:g}"
    if last == "self_attention" and point.startswith("decoder.") and config.recurrent:
        return "ReLU of the states"
    if last == "head" and not config.head.norm:
        return OPERATIONS["inner"]
    if last in OPERATIONS:
        return OPERATIONS[last]
    if last == "embedding":
        added = ["token types"] * bool(config.token_types)
        added += ["positions"] * (config.positions in (*SINUSOIDS, "learned"))
        return " and ".join(added) or "embedding"
    norm = "layer norm" if config.norm == "layernorm" else "RMS norm"
    if last.isdigit():  # a layer's last
        return norm if config.norm_placement == "post" else OPERATIONS["residual"]
    return f"{norm} after the stack" if last == "norm" else norm


def makers(points: Iterable[str], parameters: Iterable[str]) -> dict[str, str]:
    """Return {point: the module with parameters that makes it}.

    A module makes the point of its own name; where that is none, the point of the module that it is the last part of,
    as an attention's output projection does.
    """
    known, modules = set(points), {}
    for module in dict.fromkeys(name.rpartition(".")[0] for name in parameters):
        modules[module if module in known else module.rpartition(".")[0]] = module
    return {point: module for point, module in modules.items() if point in known}


def modules_between(points: Sequence[str], parameters: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (module, point before it, point that it makes) of each of `makers`, in the order of the points.

    The point before it is named where no module makes it: a sum, an activation, heads merged.
    """
    parameters = list(parameters)
    made = makers(points, parameters)
    modules = {path for name in parameters for path in accumulate(name.split("."), "{}.{}".format)}
    for earlier, point in pairwise(["", *points]):
        if point in made:
            place = made[point].rpartition(".")[0]
            read = earlier.startswith(f"{place}.") and earlier.rpartition(".")[2] not in HEADS
            yield made[point], earlier if read and earlier not in modules else "", point


def positions_first(value: Array) -> Array:
    """Turn (B,H,L,d) into (B,L,H,d): where there are heads, they come first. A state (B,D) is of one position."""
    return value.swapaxes(1, 2) if value.ndim == 4 else value[:, None] if value.ndim == 2 else value


def valid_at(point: str, case: Case, part: slice | None, length: int) -> NDArray[np.bool_]:
    """Return (B,L), the positions of a point that count. `part`: the decoder's positions in this pass, if not all."""
    of_keys = point.rpartition(".")[2].startswith(("key", "value"))
    if point.startswith("encoder.") or ("cross_attention" in point and of_keys):
        return case.source_real
    real = case.valid("logits")
    stop = real.shape[1] if part is None else part.stop
    return real[:, stop - length : stop]
