"""What every Hugging Face folder that we write says in the same words: its activations, generation and tokenizer."""

from __future__ import annotations

import json
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import MASK, SOURCE_IDS, companions

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
"""Ours to theirs."""


def generation_config(c: TransformerConfig) -> dict[str, Any]:
    """Greedy as ours: pad and bos are never chosen, nothing is forced."""
    return {
        "pad_token_id": c.pad_id,
        "bos_token_id": c.bos_id,
        "eos_token_id": c.eos_id,
        **({"decoder_start_token_id": c.bos_id} if c.has_encoder else {}),
        "bad_words_ids": [[id] for id in sorted({c.pad_id, c.bos_id})],
        "max_length": c.max_positions,
        "do_sample": False,
        "num_beams": 1,
        "use_cache": True,
    }


def tokenizer_config(config: TransformerConfig, tokenizer: str) -> dict[str, Any]:
    """tokenizer_config.json for this tokenizer.json: special tokens by their ids, and text taken as it is."""
    contents = {entry["id"]: entry["content"] for entry in json.loads(tokenizer).get("added_tokens", [])}
    roles = {"bos_token": config.bos_id, "eos_token": config.eos_id, "pad_token": config.pad_id}
    special = {role: contents[id] for role, id in roles.items() if id in contents}
    if "<unk>" in contents.values():
        special["unk_token"] = "<unk>"
    masks = "<mask>" in contents.values()
    if masks:
        special["mask_token"] = "<mask>"
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_input_names": [SOURCE_IDS.published, *(entry.published for entry in companions(config)), MASK],
        "model_max_length": config.max_positions,
        "padding_side": "left" if config.architecture == "decoder" else "right",
        "clean_up_tokenization_spaces": False,
        # "</s>" in a text is text, but <mask> is what an encoder is to fill in.
        "split_special_tokens": not (masks and config.architecture == "encoder"),
    }
