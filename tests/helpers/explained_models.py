"""Small random models of each architecture with a tokenizer, and what stands in a page of `explain`."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from random_models import random_weights

from export import export_onnx
from export.explain.content import FINE
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.text.tokenizer import Tokenizer

TEXTS = ["one two three. four five six! größer 東京 seven eight " * 3]
SIZES = dict(d_model=32, heads=4, d_ff=48, max_positions=40, encoder_layers=2, decoder_layers=3)
ALONE = {"encoder": dict(decoder_layers=0), "decoder": dict(encoder_layers=0, tie_embeddings="target-output")}


def write_explained(folder: Path, architecture: str, onnx: bool = True, seed: int = 3, **sizes: Any) -> Path:
    """FOLDER/model and FOLDER/onnx. An encoder's vocabulary has a <mask>. -> FOLDER"""
    tokenizer = Tokenizer.train(TEXTS, vocab_size=290, mask=architecture == "encoder")
    layers = ALONE.get(architecture, {})
    config = TransformerConfig(
        **{"architecture": architecture, "vocab_size": tokenizer.vocab_size, **SIZES, **layers, **sizes}
    )
    save_checkpoint(folder / "model", config, random_weights(config, seed), tokenizer.to_json(), force=True)
    if onnx:
        export_onnx(folder / "model", folder / "onnx", force=True)
    return folder


def data_of(page: Path) -> dict[str, Any]:
    """The numbers that a page draws."""
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S
    )
    assert found is not None
    return json.loads(found[1])


def unpacked(text: str, bits: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Read what `content.packed` wrote, to within half a step."""
    data = np.frombuffer(base64.b64decode(text), "<u2" if bits == FINE else "u1")
    if data.size < np.prod(shape):  # no row looks ahead
        held, rows, columns = data, *np.tril_indices(shape[-1])
        data = np.zeros(shape, held.dtype)
        data[..., rows, columns] = held.reshape(*shape[:-2], -1)
    return data.reshape(shape) / (2**bits - 1)
