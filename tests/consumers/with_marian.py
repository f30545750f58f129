"""Logits and tokens of `transformers`' Marian and Pegasus alone: runs in an environment that has no package of ours.

    python with_marian.py TASKS.json

Tasks: a list of {"folder", "make", "inputs", "searches", "answers"}. `make`: null, or {"config", "end"} of a random
model to be saved to `folder` first, `end` being added to the logits of the end of sentence. `inputs`: .npz with ids,
mask (B,S) and target (B,T). `searches`: {name: arguments of generate}. `answers`: the .npz to write, logits (B,T,V)
and, under each search's name, rows of new tokens (B, .), padded.
"""

import json
import os
import socket
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")


def no_network(*_):
    raise OSError("these tests use no network")


socket.socket.connect = no_network

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForSeq2SeqLM  # noqa: E402


def make(folder: str, config: dict, end: float) -> None:
    """Every parameter drawn at random, so that no bias is zero and no two matrices are equal.

    Norms have weights of either sign: else a tied matrix finds the token again that went in, and repeats it for ever.
    """
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
                if name.endswith("norm.weight"):
                    parameter.add_(torch.sign(parameter))
        model.final_logits_bias.normal_(0.0, 0.5)
        model.final_logits_bias[0, config["eos_token_id"]] += end
    model.generation_config.bad_words_ids = [[config["pad_token_id"]]]  # as the published ones have it
    model.save_pretrained(folder, safe_serialization=True)


def answer(folder: str, inputs: str, searches: dict, answers: str) -> None:
    model, given = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), np.load(inputs)
    ids, mask, target = (torch.tensor(given[name]) for name in ("ids", "mask", "target"))
    with torch.no_grad():
        found = {"logits": model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits.numpy()}
        for name, options in searches.items():
            rows = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **options).numpy()
            assert (rows[:, 0] == model.config.decoder_start_token_id).all()
            found[name] = rows[:, 1:]
    np.savez(answers, **found)


def main(tasks: str) -> None:
    torch.set_num_threads(1)
    for task in json.loads(Path(tasks).read_text(encoding="utf-8")):
        made = task.pop("make")
        if made:
            make(task["folder"], **made)
        answer(**task)


if __name__ == "__main__":
    main(*sys.argv[1:])
