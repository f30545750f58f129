"""Attention weights of the target `cpu`, whose decoder's operators keep them to themselves, from what these read.

Shapes: B sentences, T tokens decoded one a run, S source, H heads, d one head as the operators take it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from export.validate.reference.layers import softmax

Array = NDArray

OPERATORS = {"self_attention": "DecoderMaskedMultiHeadAttention", "cross_attention": "MultiHeadAttention"}


@dataclass(frozen=True)
class Read:
    """What one operator reads, names of values: its queries, its new keys (or the source's) and, of relative
    positions, what is added to the scores."""

    queries: str
    keys: str
    added: str
    scale: float
    of_source: bool
    """The keys are the source's, an input of the graph."""

    @property
    def values(self) -> list[str]:
        """Those that the graph computes."""
        return [name for name in (self.queries, self.added, "" if self.of_source else self.keys) if name]


def values_read(graph: onnx.GraphProto, points: Sequence[str]) -> dict[str, Read]:
    """Return {point: what its operator reads} of those `points`, NAME.weights, that are of the decoder."""
    return dict(_read(graph, points))


def _read(graph: onnx.GraphProto, points: Sequence[str]) -> Iterator[tuple[str, Read]]:
    for point in points:
        module = point.rpartition(".")[0]
        scope = module.replace(".", "/").replace("layers/", "layers.")
        operator = OPERATORS[module.rpartition(".")[2]]
        nodes = [node for node in graph.node if node.name.startswith(f"{scope}/") and node.op_type == operator]
        for node in nodes[:1]:
            scale = next(attribute.f for attribute in node.attribute if attribute.name == "scale")
            added = node.input[4] if operator == OPERATORS["self_attention"] else ""
            of_source = node.input[1] in {value.name for value in graph.input}
            yield point, Read(node.input[0], node.input[1], added, scale, of_source)


def decoder_weights(
    read: Mapping[str, Read],
    observed: Mapping[str, Sequence[Array]],
    cross: Mapping[str, Array],
    heads: int,
    real: NDArray[np.bool_],
) -> dict[str, Array]:
    """Return {point: weights (B, H, T, T or S)}.

    observed: each value, run by run. cross: keys (B, H, S, d) and values of the source, by the names of the
    graph's inputs. real (B, S): True
    on its tokens.
    """
    weights = {}
    for point, each in read.items():
        q = _by_head(observed[each.queries], heads)
        if each.of_source:
            k = cross[each.keys]
            hidden = np.where(real, np.float32(0), np.float32(-np.inf))[:, None, None]
        else:
            k = _by_head(observed[each.keys], heads)
            length = q.shape[2]
            hidden = np.where(np.tri(length, dtype=bool), np.float32(0), np.float32(-np.inf))[None, None]
            if each.added:
                hidden = hidden + _added(observed[each.added], length)
        weights[point] = softmax(q @ k.swapaxes(-1, -2) * np.float32(each.scale) + hidden)
    return weights


def _by_head(runs: Sequence[Array], heads: int) -> Array:
    """Join the rows of all runs, (B, 1, H*d) or (1, B, H*d) each -> (B, H, T, d)."""
    return np.stack([run.reshape(-1, heads, run.shape[-1] // heads) for run in runs], axis=2)


def _added(runs: Sequence[Array], length: int) -> Array:
    """Join what is added to the scores of each run, (1, H, 1, t + 1) -> (1, H, T, T), 0 where no key is."""
    added = np.zeros((1, runs[0].shape[1], length, length), np.float32)
    for t, run in enumerate(runs):
        added[:, :, t, : t + 1] = run[:, :, 0]
    return added
