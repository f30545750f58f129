"""Names of the graphs that a folder can hold; each is NAME.onnx there."""

from __future__ import annotations

ENCODER, FIRST, NEXT, MERGED = "encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged"

ALONE = "model"

ENCODER_ROWS, DECODER_ROWS = "encoder_rows", "decoder_rows"

ENCODER_FIXED, DECODER_FIXED = "encoder_fixed", "decoder_fixed"
