"""Tiny random decoders in folders of sentence-transformers, and the vectors that it computes: golden_vectors/.

Runs where sentence-transformers is (6.2.0, with transformers 5.24.0), and none of our packages:

    python tests/mlx_transformer/families/make_golden_vectors.py [NAME ...]

Where transformers 4 is, it reads the folders and must compute the same. Each holds what sentence-transformers writes,
and answers.npz: texts (N,), their vectors without a prompt, plain (N, W), and with one, query (N, W).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from golden_decoder_models import GEMMA3, MISTRAL, QWEN3
from sentence_transformers import SentenceTransformer, models
from tokenizers import processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parents[2] / "helpers"))

from makers_tokenizers import makers_json

OUT = Path(__file__).parent / "golden_vectors"
TEXTS = ["the cat", "the hat is in the house, and the cat sat on the mat: 12345 things!", "größer 東京", "a\nb"]
PROMPTS = {"query": "the query: ", "document": ""}
FULL, LOCAL = "full_attention", "sliding_attention"
MODELS = {
    "qwen3": dict(QWEN3, tie_word_embeddings=False),
    "gemma3": dict(GEMMA3, use_bidirectional_attention=True, sliding_window=7, layer_types=[LOCAL, FULL, LOCAL]),
    "mistral": dict(MISTRAL, sliding_window=5),
}
"""Qwen3's last token, EmbeddingGemma's mean and dense layers, and a mean of what follows the prompt, of texts cut."""
KINDS = {"qwen3": ("qwen2", "$A <|endoftext|>"), "gemma3": ("gemma", "<bos> $A <eos>"), "mistral": ("llama2", "<s> $A")}
"""{name: its kind of tokenizer, and what that puts around a text}"""


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    kind, template = KINDS[name]
    made = tokenizers.Tokenizer.from_str(makers_json(kind))
    special = [(token, made.token_to_id(token)) for token in template.split() if token != "$A"]
    around = processors.TemplateProcessing(single=template, pair=f"{template} $B", special_tokens=special)
    if name == "qwen3":
        around = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    made.post_processor = around
    pad = "<unk>" if name == "mistral" else "<pad>" if name == "gemma3" else "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, padding_side="left", model_max_length=24)


def make(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    cut = tokenizer(name)
    config = AutoConfig.for_model(**{**MODELS[name], "vocab_size": len(cut)})
    network = AutoModel.from_config(config)
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
            if parameter.ndim == 1 and key.endswith("weight"):
                parameter.add_(torch.sign(parameter) - float(name == "gemma3"))
    network.save_pretrained(folder / "network")
    cut.save_pretrained(folder / "network")
    width = MODELS[name]["hidden_size"]
    parts = [models.Transformer(str(folder / "network"), max_seq_length=9 if name == "mistral" else None)]
    way = "lasttoken" if name == "qwen3" else "mean"
    parts.append(models.Pooling(width, pooling_mode=way, include_prompt=name != "mistral"))
    if name == "gemma3":
        for before, after in ((width, 20), (20, width)):
            identity = torch.nn.Identity()
            parts.append(models.Dense(before, after, bias=False, activation_function=identity))
    parts += [models.Normalize()] if name != "mistral" else []
    SentenceTransformer(modules=parts, prompts=PROMPTS, device="cpu").save_pretrained(str(folder))
    for file in (folder / "network").iterdir():
        file.unlink()
    (folder / "network").rmdir()
    (folder / "README.md").unlink()
    changes = {"tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast")}  # version 4 knows no other
    if name == "gemma3":  # so that the file's own width is odd
        changes["config.json"] = dict(sliding_window=7)
    for file, values in changes.items():
        old = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(old | values, indent=2) + "\n")
    np.savez_compressed(folder / "answers.npz", texts=np.array(TEXTS), **answers(folder))
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)


def answers(folder: Path) -> dict[str, np.ndarray]:
    model = SentenceTransformer(str(folder), device="cpu").double()
    prompts = {"plain": None, "query": "query"}
    return {key: model.encode(TEXTS, prompt_name=prompt).astype(np.float32) for key, prompt in prompts.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        if transformers.__version__.startswith("5."):
            make(OUT / name, name)
        else:
            before = np.load(OUT / name / "answers.npz")
            assert all(np.allclose(array, before[key], atol=1e-6) for key, array in answers(OUT / name).items()), name
        print(name, flush=True)
