"""Names of the graphs that a folder can hold: each is NAME.onnx there, or what an earlier version called it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ENCODER, DECODER_FIRST = "encoder_model", "decoder_model"
DECODER_NEXT, DECODER_MERGED = "decoder_with_past_model", "decoder_model_merged"

MODEL = "model"

ENCODER_CPU, DECODER_CPU = "encoder_cpu", "decoder_cpu"

ENCODER_COREML, DECODER_COREML = "encoder_coreml", "decoder_coreml"

CROSS_DECODERS = (DECODER_FIRST, DECODER_NEXT, DECODER_MERGED, DECODER_CPU, DECODER_COREML)
"""Decoders over an encoder's output, of an encoder-decoder."""

CROSS_ATTENTION = "cross_attention"
"""Their optional output: of one layer, from where in the source each token's row was read (rows, T, S)."""

GRAPHS = (
    *(ENCODER, DECODER_FIRST, DECODER_NEXT, DECODER_MERGED, MODEL),
    *(ENCODER_CPU, DECODER_CPU, ENCODER_COREML, DECODER_COREML),
)

READ_SOURCES = (ENCODER, ENCODER_CPU, MODEL)
"""The graphs that can read vectors in place of ids."""

INPUTS_EMBEDS = "inputs_embeds"
"""The input by which they do (rows, S, D)."""


@dataclass(frozen=True)
class Interface:
    """What a folder's graphs take and return besides what all do, as it was asked for when they were exported."""

    attention_layer: int | None = None
    """The layer whose cross-attention the decoders return; None: they return none."""
    inputs_embeds: bool = False
    """The encoder reads vectors in place of ids."""

    def settings(self, graph: str) -> dict[str, Any]:
        """What the builder of this graph is told of it."""
        if graph in CROSS_DECODERS:
            return {} if self.attention_layer is None else {"attention": self.attention_layer}
        return {INPUTS_EMBEDS: True} if self.inputs_embeds and graph in READ_SOURCES else {}


USUAL = Interface()

EARLIER = {
    ENCODER_CPU: "encoder_rows",
    DECODER_CPU: "decoder_rows",
    ENCODER_COREML: "encoder_fixed",
    DECODER_COREML: "decoder_fixed",
}
"""Folders that were written up to version 0.1 hold the same graphs under these names."""
