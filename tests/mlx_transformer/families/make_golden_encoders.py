"""Tiny random encoders of `transformers`, and what it computes with them: golden_encoders/ and golden_encoders_5/.

Runs in an environment that has transformers and none of our packages: version 4 makes the models of the first folder,
version 5 reads these and saves them again in the second. Names make these alone:

    make .venv-consumers/.installed
    .venv-consumers/bin/python tests/mlx_transformer/families/make_golden_encoders.py OUT [NAME ...]

Each folder holds what `save_pretrained` writes and answers.npz: ids, mask and types (B, S), and by its name in
`transformers` all that the model gives: last_hidden_state, pooler_output, logits, start_logits, end_logits. One row
fills the table of positions, one is of one token, and one is padded on the left where the family counts no column.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import numpy as np
import torch
import transformers
from golden_encoder_models import MODELS
from transformers import AutoConfig

GIVEN = ("last_hidden_state", "pooler_output", "logits", "prediction_logits", "start_logits", "end_logits")
COUNT_TOKENS = ("roberta", "xlm-roberta", "modernbert")
"""Families that count tokens, not columns."""
FIVE = transformers.__version__.startswith("5.")


def answers(model, config: dict) -> dict[str, np.ndarray]:
    ids, mask, types = inputs(config)
    given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    if config.get("type_vocab_size"):
        given["token_type_ids"] = torch.tensor(types)
    with torch.no_grad():
        found = model(**given)
    computed = {name: found[name].numpy() for name in GIVEN if name in found}
    if "prediction_logits" in computed:
        computed["logits"] = computed.pop("prediction_logits")
    return dict(ids=ids, mask=mask, types=types, **computed)


def inputs(config: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    counts = config["model_type"] in COUNT_TOKENS
    # Poolers read the first column, be it padding.
    of_rows = config["architectures"][0].endswith(("Model", "SequenceClassification")) and config.get("pooler", True)
    pad, most = config["pad_token_id"], config["max_position_embeddings"]
    most -= pad + 1 if "roberta" in config["model_type"] else 0
    lengths = (most, 4, 1, 11)
    ids = np.full((len(lengths), most), pad)
    mask = np.zeros_like(ids)
    words = np.setdiff1d(np.arange(config["vocab_size"]), [pad])
    for row, length in enumerate(lengths):
        part = slice(most - length, None) if row == 1 and counts and not of_rows else slice(length)
        ids[row, part], mask[row, part] = rng.choice(words, length), 1
    return ids, mask, rng.integers(0, config.get("type_vocab_size") or 1, ids.shape)


def random_model(config: dict):
    """Every parameter drawn at random, norms of either sign."""
    torch.manual_seed(0)
    of = {key: value for key, value in config.items() if key not in ("architectures", "pooler")}
    options = {"add_pooling_layer": False} if config.get("pooler") is False else {}
    kind = getattr(transformers, config["architectures"][0])
    model = kind(AutoConfig.for_model(**of), **options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(torch.sign(parameter))
    return model


def share_bias(model) -> None:
    """What version 4 shares: of an untied classifier version 5 reads one bias and draws the other."""
    predictions = getattr(getattr(model, "cls", None), "predictions", None) or getattr(model, "lm_head", None)
    if hasattr(predictions, "bias"):
        predictions.decoder.bias = predictions.bias


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, first = Path(sys.argv[1]), Path(__file__).parent / "golden_encoders"
    for name in sys.argv[2:] or MODELS:
        config = MODELS[name]
        if FIVE:
            kind = getattr(transformers, config["architectures"][0])
            options = {"add_pooling_layer": False} if config.get("pooler") is False else {}
            model = kind.from_pretrained(first / name, **options).eval()
            share_bias(model)
        else:
            model = random_model(config)
        model.save_pretrained(out / name, safe_serialization=True)
        (out / name / "model.safetensors").chmod(0o644)
        np.savez(out / name / "answers.npz", **answers(model, config))
