"""Tiny random models of `transformers`, and what it computes with them: the folders in `golden/` and `golden_5/`.

Runs in an environment that has transformers and none of our packages: version 4 makes the models of `golden/`,
version 5 reads these and saves them again in `golden_5/`, with those that it alone makes. Names make these alone:

    make .venv-consumers/.installed
    .venv-consumers/bin/python tests/mlx_transformer/families/make_golden.py tests/mlx_transformer/families/golden t5
    .venv-of-5/bin/python tests/mlx_transformer/families/make_golden.py tests/mlx_transformer/families/golden_5 t5

Each folder holds what `save_pretrained` writes and answers.npz: ids, mask (B, S), target (B, T), logits (B, T, V), and
the new tokens of a greedy search and of four beams (B, .), padded. Rows are padded on either side where the family
counts no column; the first row and the target fill tables of positions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import numpy as np
import torch
import transformers
from golden_models import MODELS, MODELS_OF_4, MODELS_OF_5
from transformers import AutoConfig, AutoModelForSeq2SeqLM

LENGTHS, NEW = (26, 4, 1), 12
SEARCHES = {"tokens": dict(num_beams=1), "beams": dict(num_beams=4, early_stopping=True, length_penalty=1.0)}
END = 2.0
"""What the classifier's row of the end is multiplied by, so that rows end at several lengths."""
COUNT_TOKENS = ("t5", "mt5", "umt5", "m2m_100")
"""Families that count tokens, not columns."""
FIVE = transformers.__version__.startswith("5.")


def first_model(config: dict, random_model: Callable, answers: Callable, seeds: int = 1000) -> tuple:
    """The first random model whose rows hold several tokens and end here and there, or the last; and its answers."""
    for seed in range(seeds):
        model = random_model(config, seed)
        found = answers(model, config)
        ended = (found["tokens"] == config["eos_token_id"]).any(axis=1)
        several = len(np.unique(found["tokens"])) >= 8 and not np.array_equal(found["tokens"], found["beams"])
        if several and ended.any() and not ended.all():
            break
    return model, found


def save(folder: Path, model, found: dict[str, np.ndarray]) -> None:
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "model.safetensors").chmod(0o644)
    np.savez(folder / "answers.npz", **found)


def answers(model, config: dict) -> dict[str, np.ndarray]:
    ids, mask, target = inputs(config)
    given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    with torch.no_grad():
        logits = model(**given, decoder_input_ids=torch.tensor(target)).logits.numpy()
        searched = {
            name: model.generate(**given, max_new_tokens=NEW, do_sample=False, **options)[:, 1:].numpy()
            for name, options in SEARCHES.items()
        }
    return dict(ids=ids, mask=mask, target=target, logits=logits, **searched)


def random_model(config: dict, seed: int):
    """Every parameter drawn at random, norms of either sign: else a tied matrix finds again what went in."""
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                scale = 1.0 if "relative" in name else parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
                parameter.normal_(0.0, scale)
                if "norm" in name and name.endswith("weight"):
                    parameter.add_(torch.sign(parameter))
        if "final_logits_bias" in dict(model.named_buffers()):
            model.final_logits_bias.normal_(0.0, 0.5)
        model.get_output_embeddings().weight[config["eos_token_id"]] *= END
    banned = {config["pad_token_id"], config["decoder_start_token_id"]} - {config["eos_token_id"]}
    model.generation_config.bad_words_ids = [[id] for id in sorted(banned)]
    return model


def inputs(config: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, mask (B, S) and target (B, T)."""
    rng = np.random.default_rng(1)
    ids = np.full((len(LENGTHS), max(LENGTHS)), config["pad_token_id"])
    mask = np.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        left = row == 1 and config["model_type"] in COUNT_TOKENS
        part = slice(max(LENGTHS) - length, None) if left else slice(length)
        ids[row, part], mask[row, part] = words(rng, config, "vocab_size", length), 1
    target = words(rng, config, "decoder_vocab_size", (len(LENGTHS), max(LENGTHS)))
    target[:, 0] = config["decoder_start_token_id"]
    return ids, mask, target


def words(rng: np.random.Generator, config: dict, size: str, shape) -> np.ndarray:
    """Ids of a vocabulary but padding, which M2M100 counts as none."""
    ids = np.arange(3, config.get(size, config["vocab_size"]))
    return rng.choice(ids[ids != config["pad_token_id"]], shape)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, first = Path(sys.argv[1]), Path(__file__).parent / "golden"
    for name in sys.argv[2:] or [*MODELS, *(MODELS_OF_5 if FIVE else MODELS_OF_4)]:
        if FIVE and name in MODELS:
            model = AutoModelForSeq2SeqLM.from_pretrained(first / name).eval()
            if not model.config.tie_word_embeddings:  # of what version 4 shares, version 5 reads one and draws two
                model.model.encoder.embed_tokens = model.model.decoder.embed_tokens = model.model.shared
            save(out / name, model, answers(model, MODELS[name]))
        else:
            config = {**MODELS, **MODELS_OF_4, **MODELS_OF_5}[name]
            save(out / name, *first_model(config, random_model, answers))
