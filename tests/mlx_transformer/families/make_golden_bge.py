"""A tiny random model of bge-m3's form, and what PyTorch computes with it in float64: golden_bge/.

Runs where transformers 4 is, and none of our packages:

    make .venv-consumers/.installed
    .venv-consumers/bin/python tests/mlx_transformer/families/make_golden_bge.py

The folder holds what sentence-transformers reads, tokenizer.json among it, the two files of bge-m3's other heads as
`torch.save` writes them, one in float16, and answers.npz: texts (N,), ids and mask (N, L), and by the formulas of
Chen et al. 2024, section 3.2, dense (N, D), lexical (N, V), for each id the largest weight of its places and 0 for
special ids and the unknown word's, and multi (N, L - 1, W), 0 on padding.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
from golden_encoder_models import XLM_R
from make_golden_encoders import random_model
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors, trainers

OUT = Path(__file__).parent / "golden_bge"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
TEXTS = ["one two three, one two one", "größer größer 東京", "three", "two ones and a three: four five six seven one"]
UNKNOWN = "東"
MODELS = "sentence_transformers.models."
FILES = {
    "modules.json": [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": MODELS + kind}
        for i, kind in enumerate(("Transformer", "Pooling", "Normalize"))
    ],
    "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": False},
}
WIDTH = 12
"""Numbers of a token's vector."""


def tokenizer() -> tokenizers.Tokenizer:
    """As `transformers` has XLM-R's, of a few pieces."""
    backend = tokenizers.Tokenizer(models.Unigram())
    spaces = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    known = [text.replace(UNKNOWN, "") for text in TEXTS]
    backend.train_from_iterator(
        known, trainers.UnigramTrainer(vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>")
    )
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    special = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=special
    )
    return backend


def main() -> None:
    torch.set_num_threads(1)
    cut = tokenizer()
    rows = [encoding.ids for encoding in cut.encode_batch(TEXTS)]
    sizes = {"vocab_size": cut.get_vocab_size(), "max_position_embeddings": 42, "pad_token_id": 1}
    model = random_model({**XLM_R, **sizes, "architectures": ["XLMRobertaModel"], "pooler": False})
    model.save_pretrained(OUT, safe_serialization=True)
    cut.save(str(OUT / "tokenizer.json"))
    for name, values in FILES.items():
        (OUT / name).parent.mkdir(exist_ok=True)
        (OUT / name).write_text(json.dumps(values, indent=2) + "\n")
    width = model.config.hidden_size
    sparse, multi = torch.nn.Linear(width, 1).half(), torch.nn.Linear(width, WIDTH)
    torch.nn.init.normal_(sparse.weight)
    torch.save(sparse.state_dict(), OUT / "sparse_linear.pt")
    torch.save(multi.state_dict(), OUT / "colbert_linear.pt")
    for file in (OUT / "model.safetensors", *OUT.glob("*.pt")):
        file.chmod(0o644)

    longest = max(map(len, rows))
    ids = np.array([row + [1] * (longest - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    unknown = [SPECIAL.index(token) for token in SPECIAL]
    assert all((ids == id).any() for id in unknown), "the texts have every special id"
    with torch.no_grad():
        model, sparse, multi = model.double(), sparse.double(), multi.double()
        hidden = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state
        weights = torch.relu(sparse(hidden)).squeeze(-1) * torch.tensor(mask)
        lexical = torch.zeros(len(ids), sizes["vocab_size"], dtype=torch.float64)
        lexical = lexical.scatter_reduce(1, torch.tensor(ids), weights, "amax")
        lexical[:, unknown] = 0
        vectors = torch.nn.functional.normalize(multi(hidden[:, 1:]), dim=-1) * torch.tensor(mask)[:, 1:, None]
        dense = torch.nn.functional.normalize(hidden[:, 0], dim=-1)
    answers = {"texts": np.array(TEXTS), "ids": ids, "mask": mask, "dense": dense, "lexical": lexical, "multi": vectors}
    np.savez(OUT / "answers.npz", **{name: np.asarray(value) for name, value in answers.items()})


if __name__ == "__main__":
    main()
