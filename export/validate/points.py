"""Names of the taps, in the order of the data's way through the network.

encoder.embedding   encoder.layers.0.self_attention   encoder.layers.0.feed_forward   encoder.layers.0   encoder.norm
decoder.embedding   decoder.layers.0.self_attention   decoder.layers.0.cross_attention   ...   decoder.norm   logits
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlx_transformer.spec.config import TransformerConfig


def tap_names(config: TransformerConfig) -> list[str]:
    return list(_names(config))


def _names(c: TransformerConfig) -> Iterator[str]:
    stacks = [("encoder", c.encoder_layers, c.has_encoder, False), ("decoder", c.decoder_layers, c.has_decoder, True)]
    for stack, layers, present, causal in stacks:
        if not present:
            continue
        yield f"{stack}.embedding"
        for i in range(layers):
            yield f"{stack}.layers.{i}.self_attention"
            if causal and c.has_encoder:
                yield f"{stack}.layers.{i}.cross_attention"
            yield f"{stack}.layers.{i}.feed_forward"
            yield f"{stack}.layers.{i}"
        if c.norm_placement == "pre":
            yield f"{stack}.norm"
    yield "logits"


def natural_order(taps: Iterable[str]) -> list[str]:
    """Each tap once, in the order of the data, whatever paths they were seen on: that of their first appearance."""
    return list(dict.fromkeys(taps))
