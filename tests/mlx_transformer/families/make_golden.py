"""Tiny random models of `transformers`, and what it computes with them: the folders in `golden/`.

Runs in an environment that has transformers and none of our packages. Names of `MODELS` make these alone:

    make .venv-consumers/.installed
    .venv-consumers/bin/python tests/mlx_transformer/families/make_golden.py tests/mlx_transformer/families/golden t5

Each folder holds what `save_pretrained` writes and answers.npz: ids, mask (B, S), target (B, T), logits (B, T, V) and
tokens, the new tokens of a greedy search (B, .), padded. Rows are padded on either side where the family counts no
positions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

T5 = dict(
    model_type="t5",
    **dict(vocab_size=40, d_model=16, d_kv=6, num_heads=3, d_ff=20, num_layers=2, num_decoder_layers=1),
    **dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0),
)
MARIAN = dict(
    model_type="marian",
    **dict(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=2, max_position_embeddings=32),
    **dict(encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=20, decoder_ffn_dim=26),
    **dict(pad_token_id=39, decoder_start_token_id=39, eos_token_id=0, forced_eos_token_id=None),
    **dict(activation_function="swish", scale_embedding=True),
)
MODELS = {
    "t5": T5,
    "t5-1.1": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2},
    "mt5": {**T5, "model_type": "mt5", "feed_forward_proj": "gated-gelu", "d_model": 20, "d_kv": 5}
    | dict(relative_attention_num_buckets=8, relative_attention_max_distance=12),
    "madlad": {**T5, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False}
    | dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=0),
    "marian": MARIAN,
    "pegasus": {**MARIAN, "model_type": "pegasus", "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    | dict(activation_function="relu"),
}
LENGTHS, TARGET, NEW = (26, 4, 1), 7, 12
END = 2.0
"""What the classifier's row of the end is multiplied by, so that rows end at several lengths."""


def make(folder: Path, config: dict) -> None:
    """The first random model whose rows hold several tokens and end here and there."""
    for seed in range(1000):
        model, (ids, mask, target) = random_model(config, seed), inputs(config)
        given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        with torch.no_grad():
            logits = model(**given, decoder_input_ids=torch.tensor(target)).logits.numpy()
            tokens = model.generate(**given, max_new_tokens=NEW, do_sample=False, num_beams=1)[:, 1:].numpy()
        ended = (tokens == config["eos_token_id"]).any(axis=1)
        if len(np.unique(tokens)) >= 8 and ended.any() and not ended.all():
            break
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "model.safetensors").chmod(0o644)
    np.savez(folder / "answers.npz", ids=ids, mask=mask, target=target, logits=logits, tokens=tokens)


def random_model(config: dict, seed: int):
    """Every parameter drawn at random, norms of either sign: else a tied matrix finds again what went in."""
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                scale = 1.0 if "relative" in name else parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
                parameter.normal_(0.0, scale)
                if "norm" in name and name.endswith("weight"):
                    parameter.add_(torch.sign(parameter))
        if "final_logits_bias" in dict(model.named_buffers()):
            model.final_logits_bias.normal_(0.0, 0.5)
        model.get_output_embeddings().weight[config["eos_token_id"]] *= END
    model.generation_config.bad_words_ids = [[id] for id in {config["pad_token_id"], config["decoder_start_token_id"]}]
    return model


def inputs(config: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, mask (B, S) and target (B, T)."""
    rng = np.random.default_rng(1)
    ids = np.full((len(LENGTHS), max(LENGTHS)), config["pad_token_id"])
    mask = np.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        left = row == 1 and "t5" in config["model_type"]
        part = slice(max(LENGTHS) - length, None) if left else slice(length)
        ids[row, part], mask[row, part] = rng.integers(3, config["vocab_size"] - 1, length), 1
    target = rng.integers(3, config["vocab_size"] - 1, (len(LENGTHS), TARGET))
    target[:, 0] = config["decoder_start_token_id"]
    return ids, mask, target


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or MODELS:
        make(Path(sys.argv[1]) / name, MODELS[name])
