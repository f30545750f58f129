"""Tokens that `transformers` generates by its settings, with the tiny random Marian in rules_model/.

Runs in an environment that has transformers and none of our packages:

    .venv-consumers/bin/python tests/mlx_transformer/generation/make_rules.py

rules.json holds {"ids": rows, "cases": [...]}: of each case the settings, as in generation_config.json, the tokens of
each row, and the scores of beam search.
"""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import torch
from transformers import AutoModelForSeq2SeqLM

HERE = Path(__file__).parent
MODEL = HERE / "rules_model"
PAD, END = 39, 0
ROWS = [[5, 17, 3, 22, 9, 31, 0], [11, 2, 0], [8, 8, 30, 14, 0]]
RULES = [
    {},
    {"forced_bos_token_id": 7},
    {"forced_eos_token_id": END},
    {"forced_bos_token_id": 12, "forced_eos_token_id": END, "no_repeat_ngram_size": 2},
    {"eos_token_id": [END, 5, 11, 20]},
    {"eos_token_id": [END, 3], "forced_eos_token_id": END, "min_length": 4},
    {"suppress_tokens": [1, 4, 6, 13, 27, 33]},
    {"min_length": 7},
    {"min_new_tokens": 5, "eos_token_id": [END, 9]},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2, "forced_bos_token_id": 30},
    {"bad_words_ids": [[PAD], [9, 23], [23, 23, 23], [26, 26, 33, 26], [26, 32], [33, 32]]},
    {"bad_words_ids": [[PAD], [9], [23, 17], [30, 26, 23]], "forced_bos_token_id": 30, "no_repeat_ngram_size": 2},
    {"begin_suppress_tokens": [9, 26, 35]},
    {"begin_suppress_tokens": [26, 23, END], "forced_bos_token_id": 12},
    {"bad_words_ids": [[PAD], [END], [9], [26]], "eos_token_id": [END, 26]},
    {"decoder_start_token_id": 12},
]
SEARCHES = [
    {"num_beams": 1},
    *(
        {"num_beams": beam, "length_penalty": penalty, "early_stopping": early}
        for beam, penalty, early in product((2, 4), (1.0, 2.0), (False, True, "never"))
    ),
]


def main() -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(MODEL).eval()
    longest = max(map(len, ROWS))
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in ROWS])
    cases = []
    for rule, search in product(RULES, SEARCHES):
        settings = {"max_length": 13, "bad_words_ids": [[PAD]], "eos_token_id": END, **search, **rule}
        given = {"decoder_start_token_id": PAD, "pad_token_id": PAD, "do_sample": False, "forced_eos_token_id": None}
        with torch.no_grad():
            found = model.generate(
                ids,
                attention_mask=(ids != PAD).long(),
                **{**given, **settings},
                return_dict_in_generate=True,
                output_scores=True,
            )
        ends = settings["eos_token_id"] if isinstance(settings["eos_token_id"], list) else [END]
        case = {"settings": settings, "tokens": [without_end(row, ends) for row in found.sequences[:, 1:].tolist()]}
        if settings["num_beams"] > 1:
            case["scores"] = [float(f"{score:.6g}") for score in found.sequences_scores.tolist()]
        cases.append(case)
    text = json.dumps({"ids": ROWS, "cases": cases}).replace('{"settings"', '\n{"settings"')
    (HERE / "rules.json").write_text(f"{text}\n", encoding="utf-8")


def without_end(row: list[int], ends: list[int]) -> list[int]:
    """The tokens before the first end."""
    return row[: next((i for i, id in enumerate(row) if id in ends), len(row))]


if __name__ == "__main__":
    main()
