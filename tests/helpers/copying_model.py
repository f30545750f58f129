"""A model whose weights are set by hand: it writes what it reads, and attends to the token that it copies.

Sinusoidal positions fill the first half of a vector; the sines of its second half, which hardly move over a sentence,
hold the tokens. Cross-attention compares the first halves of query and key; the classifier reads the second.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from export import export_onnx
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.text.tokenizer import Tokenizer

TEXT = "one two three. four five six! seven eight nine ten"
WORDS = "one two three four five six seven eight nine ten".split()
LINES = [f"{a} {b} {c}" for a in WORDS for b in WORDS[:4] for c in WORDS[:2]]
"""A text that the model copies."""
STUDENT = """
[data]
vocab_model = "unigram"
vocab_size = 300
batch_tokens = 200
[model]
preset = "student"
d_model = 64
heads = 2
d_ff = 64
encoder_layers = 1
decoder_layers = 1
[training]
steps = 4
valid_sentences = 0
"""
"""The recipe of a student of the model, for `distil`."""
WIDTH = 128
SHARP = 400.0


def write_copying_model(folder: Path, heads: int = 2, layers: int = 2, onnx: bool = True) -> Path:
    """FOLDER/model, a checkpoint with a tokenizer, and FOLDER/onnx, its export. -> FOLDER"""
    tokenizer = Tokenizer.train([f"{TEXT} " * 3], vocab_size=300)
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        d_model=WIDTH,
        heads=heads,
        d_ff=8,
        encoder_layers=1,
        decoder_layers=layers,
        max_positions=48,
        tie_embeddings="none",
        norm="rmsnorm",  # which scales all tokens and positions alike
    )
    save_checkpoint(folder / "model", config, copying_weights(config), tokenizer.to_json(), force=True)
    if onnx:
        export_onnx(folder / "model", folder / "onnx", force=True)
    return folder


def copying_weights(config: TransformerConfig) -> dict[str, np.ndarray]:
    half, codes = WIDTH // 2, np.arange(WIDTH // 2, WIDTH, 2)
    rng = np.random.default_rng(0)
    tokens = np.zeros((config.vocab_size, WIDTH), np.float32)
    tokens[:, codes] = rng.choice([-1.0, 1.0], (config.vocab_size, len(codes)))
    # Each head compares every second of the position's pairs of sine and cosine, fast and slow ones.
    compared = np.zeros((WIDTH, WIDTH), np.float32)
    width = WIDTH // config.heads
    for head in range(config.heads):
        for place, i in enumerate(range(head, half // 2, config.heads)):
            compared[head * width + 2 * place, 2 * i] = 1
            compared[head * width + 2 * place + 1, 2 * i + 1] = 1
    weights = {}
    for name, shape in parameter_shapes(config).items():
        weights[name] = np.full(shape, float(name.endswith("norm.weight")), np.float32)
    weights["source_embedding.weight"] = tokens / np.float32(np.sqrt(WIDTH))
    weights["output_proj.weight"] = tokens
    for i in range(config.decoder_layers):
        module = f"decoder.layers.{i}.cross_attention"
        weights[f"{module}.query_proj.weight"] = SHARP * compared
        weights[f"{module}.key_proj.weight"] = compared
        value, output = np.zeros((WIDTH, WIDTH), np.float32), np.zeros((WIDTH, WIDTH), np.float32)
        value[: len(codes), codes] = np.eye(len(codes))  # head 0 carries the token
        output[codes, : len(codes)] = 4 * np.eye(len(codes))
        weights[f"{module}.value_proj.weight"], weights[f"{module}.output_proj.weight"] = value, output
    return weights
