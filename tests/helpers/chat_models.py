"""A tiny decoder that chats, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chat_templates import TEMPLATES, TOKENS
from makers_tokenizers import makers_json
from random_models import random_weights

from export import export_onnx
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

SIZES: dict[str, Any] = dict(
    architecture="decoder", encoder_layers=0, norm="rmsnorm", norm_placement="pre", positions="rotary"
)
SIZES |= dict(gated=True, scale_embeddings=False, attention_bias=False, feed_forward_bias=False, activation="silu")
SIZES |= dict(tie_embeddings="target-output", d_model=16, heads=2, d_ff=24, decoder_layers=1, dropout=0.0)


def write_chat_model(folder: Path, kind: str, template: str | None = None, seed: int = 3) -> Path:
    """FOLDER/model, a decoder with a maker's vocabulary and a chat template (its kind's; "": none) as import makes it
    of a published folder, and FOLDER/onnx, its export. -> FOLDER"""
    template = TEMPLATES[kind] if template is None else template
    text = makers_json(kind)
    ids = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
    first, last = next(iter(ids.values())), ids[TOKENS[kind]["eos_token"]]
    size = max(*ids.values(), *json.loads(text)["model"]["vocab"].values()) + 1
    sizes = {"vocab_size": size, "source_vocab_size": size, "max_positions": 450}
    config = TransformerConfig(**SIZES, **sizes, pad_id=first, bos_id=first, eos_id=last)
    save_checkpoint(folder / "bare", config, random_weights(config, seed), text)
    to_huggingface(folder / "bare", folder / "theirs", family="llama")
    file = folder / "theirs" / "tokenizer_config.json"
    file.write_text(json.dumps({**TOKENS[kind], **({"chat_template": template} if template else {})}))
    import_huggingface(folder / "theirs", folder / "model")
    export_onnx(folder / "model", folder / "onnx")
    return folder
