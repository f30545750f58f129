"""Adapters of PEFT on the models of `golden/` and `golden_encoders/`, and what it computes with them: `golden_peft/`.

Runs in an environment with torch, transformers 5 and peft, and none of our packages:

    python -m venv .venv-of-peft && .venv-of-peft/bin/pip install torch transformers==5.24.0 peft==0.21.2
    .venv-of-peft/bin/python tests/mlx_transformer/families/make_golden_peft.py

Each folder holds what `save_pretrained` writes, with its base by a path from the folder, and answers.npz: ids, mask
(B, S), target (B, T) of an encoder-decoder, and logits or the last hidden state.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

HERE = Path(__file__).parent
ADAPTERS = {
    "lora": ("golden/t5", AutoModelForSeq2SeqLM, dict(target_modules=["q", "v", "wo"], task_type="SEQ_2_SEQ_LM")),
    "rslora": (
        "golden/marian",
        AutoModelForSeq2SeqLM,
        dict(target_modules=["q_proj", "k_proj", "fc1"], use_rslora=True, bias="lora_only", task_type="SEQ_2_SEQ_LM"),
    ),
    "dora": (
        "golden_5/bart",
        AutoModelForSeq2SeqLM,
        dict(
            target_modules=["q_proj", "out_proj", "fc2"],
            use_dora=True,
            rank_pattern={"fc2": 3},
            alpha_pattern={"decoder.layers.0.fc2": 7},
        ),
    ),
    "classes": (
        "golden_encoders/bert",
        AutoModelForSequenceClassification,
        dict(target_modules=["query", "value"], task_type="SEQ_CLS"),
    ),
    "embedding": (
        "golden_encoders/roberta",
        AutoModel,
        dict(target_modules=["word_embeddings", "key"]),
    ),
    "transposed": (
        "golden_decoders/gpt2",
        AutoModelForCausalLM,
        dict(target_modules=["c_attn", "c_fc"], use_dora=True, fan_in_fan_out=True, task_type="CAUSAL_LM"),
    ),
    "untied": ("golden_decoders/gpt2", AutoModelForCausalLM, dict(target_modules=["c_attn", "wte", "lm_head"])),
    "tables": (
        "golden/t5",
        AutoModelForSeq2SeqLM,
        dict(target_modules=["decoder.embed_tokens", "q"], modules_to_save=["shared"], bias="all"),
    ),
    "rows": ("golden/umt5", AutoModelForSeq2SeqLM, dict(target_modules="all-linear", trainable_token_indices=[3, 7])),
    "resized": ("golden/marian", AutoModelForSeq2SeqLM, dict(target_modules=["q_proj"], layers_to_transform=[0])),
}


def make(name: str) -> None:
    base, kind, options = ADAPTERS[name]
    torch.manual_seed(7)
    labels = {"num_labels": 3} if kind is AutoModelForSequenceClassification else {}
    model = kind.from_pretrained(HERE / base, **labels)
    if name == "resized":
        model.resize_token_embeddings(model.config.vocab_size + 5)
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=5, lora_dropout=0.1, **options)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if "magnitude" in parameter_name:
                    parameter.mul_(torch.rand_like(parameter) + 0.5)
                else:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
    golden = dict(np.load(HERE / base / "answers.npz"))
    given = {"input_ids": torch.tensor(golden["ids"]), "attention_mask": torch.tensor(golden["mask"])}
    found = {"ids": golden["ids"], "mask": golden["mask"]}
    if "target" in golden:
        given["decoder_input_ids"] = torch.tensor(golden["target"])
        found["target"] = golden["target"]
    with torch.no_grad():
        output = model(**given)
    found["logits"] = (output.logits if "logits" in output else output.last_hidden_state).numpy()
    folder = HERE / "golden_peft" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"../../{base}"
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    np.savez(folder / "answers.npz", **found)


if __name__ == "__main__":
    for name in sys.argv[1:] or ADAPTERS:
        make(name)
