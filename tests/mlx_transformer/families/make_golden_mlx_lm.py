"""Tiny random models quantised by mlx-lm, adapters, and what it computes with them: the folders in `golden_mlx_lm/`.

Runs in an environment that has mlx-lm (0.32.2) and none of our packages:

    python tests/mlx_transformer/families/make_golden_mlx_lm.py tests/mlx_transformer/families/golden_mlx_lm

A folder holds what `mlx_lm.convert` writes, but no tokenizer, and answers.npz: ids (B, L), logits (B, L, V). Folders in
ADAPTERS hold an adapter for the model named there; its answers are those of the adapted model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes, load_model, quantize_model, save_config, save_model

SIZES = dict(vocab_size=72, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=40)
IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], tie_word_embeddings=True, **SIZES, **IDS)
QWEN3 = LLAMA | dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
GPT2 = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=64, n_head=4, n_layer=2, n_positions=40)
GPT2 |= dict(n_ctx=40, layer_norm_epsilon=1e-5, vocab_size=72, **IDS)
GEMMA3 = LLAMA | dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], sliding_window=4, head_dim=24)
GEMMA3 |= dict(sliding_window_pattern=2, rope_local_base_freq=5000.0, query_pre_attn_scalar=20, rope_theta=50000.0)
GEMMA3 |= dict(hidden_activation="gelu_pytorch_tanh", layer_types=["sliding_attention", "full_attention"])


def mixed(path: str, module) -> bool | dict:
    """A scheme for each kind of layer, as in mlx-lm's mixed recipes."""
    if "v_proj" in path or "embed" in path:
        return {"group_size": 32, "bits": 6}
    if "down_proj" in path:
        return {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    return "norm" not in path and "o_proj" not in path and {"group_size": 64, "bits": 2}


MODELS = {
    "llama-4": (LLAMA, dict(group_size=32, bits=4)),
    "llama-half": (LLAMA, dict(group_size=32, bits=4, mode="mxfp4", dtype=mx.bfloat16)),
    "llama-mixed": (LLAMA, dict(group_size=32, bits=4, quant_predicate=mixed)),
    "llama-nvfp4": (LLAMA, dict(group_size=16, bits=4, mode="nvfp4")),
    "qwen3-3": (QWEN3, dict(group_size=32, bits=3)),
    "qwen3-mxfp4": (QWEN3, dict(group_size=32, bits=4, mode="mxfp4")),
    "gpt2-5": (GPT2, dict(group_size=32, bits=5)),
    "gemma3-4": (GEMMA3, dict(group_size=32, bits=4)),
    "llama": (LLAMA | dict(hidden_size=32, intermediate_size=40), None),
}
ADAPTERS = {
    "lora": ("llama", dict(num_layers=1, keys=["mlp.down_proj", "self_attn.q_proj"])),
    "lora-of-integers": ("llama-4", dict(num_layers=-1, keys=["mlp.up_proj", "self_attn.q_proj"])),
    "dora-of-integers": ("llama-4", dict(fine_tune_type="dora", num_layers=-1, keys=["self_attn.v_proj"])),
    "full": ("llama", dict(fine_tune_type="full", num_layers=1)),
}
PROMPTS = np.array([[5, 6, 7, 2, 9, 31, 70], [71, 1, 30, 30, 8, 3, 44]])


def random_parameters(model, seed: int, near: str = "") -> None:
    """Draw all parameters whose names hold `near`, norms near what does nothing."""
    mx.random.seed(seed)

    def drawn(path: str, x: mx.array) -> mx.array:
        if near not in path:
            return x
        size = 0.1 if x.ndim == 1 else x.shape[-1] ** -0.5
        return mx.random.normal(x.shape) * size + (x if x.ndim == 1 else 0)

    model.update(tree_map_with_path(drawn, model.parameters()))


def answers(folder: Path, model) -> None:
    logits = np.array(model(mx.array(PROMPTS)).astype(mx.float32))
    np.savez(folder / "answers.npz", ids=PROMPTS, logits=logits)


def make_model(folder: Path, config: dict, how: dict | None) -> None:
    kind, arguments = _get_classes(config)
    model, config = kind(arguments.from_dict(config)), dict(config)
    if config["model_type"] == "gemma3_text":
        model.sanitize({})  # which ties its classifier
    random_parameters(model, seed=3)
    if how is not None:
        how = dict(how)
        model.set_dtype(how.pop("dtype", mx.float32))
        model, config = quantize_model(model, config, **{"mode": "affine", **how})
    save_model(folder, model)
    save_config(config, folder / "config.json")
    answers(folder, load_model(folder)[0])


def make_adapter(folder: Path, base: Path, how: dict) -> None:
    model, how = load_model(base)[0], {"fine_tune_type": "lora", **how}
    parameters = dict(rank=3, scale=2.5, dropout=0.0, keys=how.pop("keys", None))
    before = dict(tree_flatten(model.parameters()))
    if how["fine_tune_type"] == "full":
        random_parameters(model, 5, "layers.1.mlp.up_proj.weight")
        changed = {n: x for n, x in tree_flatten(model.parameters()) if x is not before[n]}
    else:
        linear_to_lora_layers(model, how["num_layers"], parameters, use_dora=how["fine_tune_type"] == "dora")
        random_parameters(model, 5, "lora_")
        changed = {
            n: x for n, x in tree_flatten(model.parameters()) if n.rpartition(".")[2] in ("lora_a", "lora_b", "m")
        }
        changed = {n: x * 1.25 if n.endswith(".m") else x for n, x in changed.items()}
        model.load_weights(list(changed.items()), strict=False)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), changed)
    config = {**how, "lora_parameters": parameters, "model": f"../{base.name}"}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=4, sort_keys=True), encoding="utf-8")
    answers(folder, model)


def main(out: Path, names: list[str]) -> None:
    for name, (config, how) in MODELS.items():
        if not names or name in names:
            make_model(out / name, config, how)
    for name, (base, how) in ADAPTERS.items():
        if not names or name in names:
            make_adapter(out / name, out / base, how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
