"""Tiny random translators whose sources end with their language, and what `transformers` makes of text with them.

mBART of 25 languages, whose decoder begins with the language to write, and NLLB with the tokenizer of its first kind
(`legacy_behaviour`). Each folder of `golden_texts/` holds what `save_pretrained` writes of the model and of the slow
tokenizer, and texts.json: of several pairs of languages the ids of texts, and the tokens and texts of a greedy search
and of four beams. Runs where transformers 4 and sentencepiece are, and none of our packages:

    make .venv-consumers/.installed
    .venv-consumers/bin/pip install sentencepiece
    .venv-consumers/bin/python tests/mlx_transformer/families/make_golden_texts.py
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import sentencepiece
import torch
from golden_models import M2M100, MBART
from make_golden import SEARCHES, random_model
from transformers import MBartTokenizer, NllbTokenizer

HERE = Path(__file__).parent
LINES = HERE.parents[1] / "peers" / "lines.world"
PAIRS = {
    "mbart": [("en_XX", "ro_RO"), ("de_DE", "zh_CN"), ("ro_RO", "en_XX")],
    "nllb": [("eng_Latn", "ron_Latn"), ("deu_Latn", "zho_Hans"), ("zul_Latn", "ace_Arab")],
}
NEW = 12


def pieces() -> bytes:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES.read_text(encoding="utf-8").splitlines()),
        model_writer=file,
        **dict(vocab_size=700, character_coverage=0.98, minloglevel=2, hard_vocab_limit=False),
        normalization_rule_name="identity",
    )
    return file.getvalue()


def texts() -> list[str]:
    """Lines of many scripts, odd spaces, and what the vocabulary doesn't know."""
    lines = [line for line in LINES.read_text(encoding="utf-8").splitlines() if len(line) < 60]
    return [*random.Random(5).sample(lines, 12), "two  spaces ", " ", "x", "\U0001d11e\u2603 a"]


def make(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentencepiece.bpe.model").write_bytes(pieces())
    file = str(folder / "sentencepiece.bpe.model")
    if kind == "mbart":
        tokenizer = MBartTokenizer(file)
    else:
        tokenizer = NllbTokenizer(file, legacy_behaviour=True)
    more = {"decoder_start_token_id": tokenizer.convert_tokens_to_ids("ro_RO")} if kind == "mbart" else {}
    base = {**(MBART if kind == "mbart" else M2M100), "max_position_embeddings": 64}
    model = random_model({**base, "vocab_size": len(tokenizer), **more}, 3)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    pairs = [answers(kind, model, tokenizer, *pair) for pair in PAIRS[kind]]
    text = json.dumps({"texts": texts(), "pairs": pairs}, ensure_ascii=False)
    (folder / "texts.json").write_text(text + "\n", encoding="utf-8")


def answers(kind: str, model, tokenizer, source: str, target: str) -> dict:
    tokenizer.src_lang = source
    rows, first = [tokenizer(text).input_ids for text in texts()], tokenizer.convert_tokens_to_ids(target)
    how = {"decoder_start_token_id" if kind == "mbart" else "forced_bos_token_id": first}
    found = {"source_language": source, "target_language": target, "ids": rows}
    for name, options in SEARCHES.items():
        outputs = [
            model.generate(torch.tensor([row]), max_new_tokens=NEW, do_sample=False, **options, **how)[0, 1:].tolist()
            for row in rows
        ]
        found[name] = outputs
        found[f"{name} as text"] = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kind in PAIRS:
        make(HERE / "golden_texts" / kind, kind)
