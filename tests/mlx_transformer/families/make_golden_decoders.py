"""Tiny random decoders of `transformers`, and what it computes with them: the folders in `golden_decoders/`.

Runs in an environment that has transformers and torch and none of our packages. Version 4 makes the folders; version 5
reads them, computes the same, and writes its config.json beside the other's, as config_5.json:

    .venv-of-4/bin/python tests/mlx_transformer/families/make_golden_decoders.py [NAME ...]
    .venv-of-5/bin/python tests/mlx_transformer/families/make_golden_decoders.py [NAME ...]

Each folder holds what `save_pretrained` writes and answers.npz: ids, mask (B, S), padded on the right; logits and left
(B, S, V), of the same rows padded on the right and on the left (zeros at padding); and the new tokens of a greedy
search and of four beams (B, .), padded. All is computed in float64 with "sdpa", as the other
attention is of float32, but for Gemma 2, whose scores "sdpa" doesn't bound.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import numpy as np
import torch
import transformers
from golden_decoder_models import MODELS
from make_golden import END, SEARCHES, first_model
from transformers import AutoConfig, AutoModelForCausalLM

LENGTHS, NEW = (16, 5, 1), 10
OUT = Path(__file__).parent / "golden_decoders"


def make(folder: Path, config: dict) -> None:
    model, found = first_model(config, random_model, answers, seeds=100)
    model.float().save_pretrained(folder, safe_serialization=True)
    (folder / "model.safetensors").chmod(0o644)
    np.savez_compressed(folder / "answers.npz", **found)


def answers(model, config: dict) -> dict[str, np.ndarray]:
    rng, width = np.random.default_rng(1), max(LENGTHS)
    ids = np.full((len(LENGTHS), width), config["pad_token_id"])
    mask = np.arange(width) < np.array(LENGTHS)[:, None]
    ids[mask] = rng.integers(3, config["vocab_size"], mask.sum())
    left = np.stack([np.roll(row, width - n) for row, n in zip(ids, LENGTHS, strict=True)])
    left_mask = mask[:, ::-1].copy()
    with torch.no_grad():
        logits, on_the_left = (logits_of(model, *each) for each in ((ids, mask), (left, left_mask)))
        given = {"input_ids": torch.tensor(left), "attention_mask": torch.tensor(left_mask).long()}
        options = dict(max_new_tokens=NEW, do_sample=False)
        searched = {
            name: model.generate(**given, **options, **each)[:, width:].numpy() for name, each in SEARCHES.items()
        }
    return dict(ids=ids, mask=mask, logits=logits, left=on_the_left, **searched)


def logits_of(model, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Positions count tokens, as in `generate`."""
    places = torch.tensor(np.maximum(mask.cumsum(axis=1) - 1, 0))
    given = dict(attention_mask=torch.tensor(mask).long(), position_ids=places)
    found = model(torch.tensor(ids), use_cache=False, **given).logits.numpy()
    return np.where(mask[..., None], found, 0).astype(np.float32)


def random_model(config: dict, seed: int):
    """Every parameter drawn at random, norms of either sign: else a tied matrix finds again what went in."""
    torch.manual_seed(seed)
    options = AutoConfig.for_model(**config)
    # Version 4's sdpa divides GPT-2's scores, whatever its config says.
    plain = config.get("scale_attn_weights", True) and not config.get("scale_attn_by_inverse_layer_idx")
    attention = "sdpa" if plain else "eager"
    attention = "eager" if capped(config) else attention
    model = AutoModelForCausalLM.from_config(options, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.add_(torch.sign(parameter) - float("gemma" in config["model_type"]))
        model.get_output_embeddings().weight[config["eos_token_id"]] *= END
    banned = {config["pad_token_id"], config["bos_token_id"]} - {config["eos_token_id"]}
    model.generation_config.bad_words_ids = [[id] for id in sorted(banned)]
    return model if capped(config) else model.double()


def capped(config: dict) -> bool:
    """Whether scores may be bounded, which "sdpa" leaves out; the other attention can't be computed in float64."""
    return config["model_type"] == "gemma2"


def read_again(folder: Path, config: dict) -> None:
    """By version 5, which must compute what version 4 did."""
    how = ("eager", torch.float32) if capped(config) else ("sdpa", torch.float64)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=how[0], dtype=how[1]).eval()
    found, before = answers(model, config), np.load(folder / "answers.npz")
    assert all(np.allclose(found[name], before[name], atol=1e-5) for name in before), folder
    with TemporaryDirectory() as out:
        model.float().save_pretrained(out)
        shutil.copyfile(Path(out) / "config.json", folder / "config_5.json")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        if transformers.__version__.startswith("5."):
            read_again(OUT / name, MODELS[name])
        else:
            make(OUT / name, MODELS[name])
        print(name, flush=True)
