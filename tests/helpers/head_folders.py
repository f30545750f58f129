"""Tiny encoders with heads as `transformers` has them, of random weights (`golden_encoders/`), with a vocabulary of
a few words. Needs none of our packages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers

GOLDEN = Path(__file__).parents[1] / "mlx_transformer" / "families" / "golden_encoders"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"a good film was bad and so it is not ##s ##ing , .".split()]
LABELS = {"0": "I-X", "1": "B-X", "2": "O"}
"""Of the model that tags."""


def published(name: str, folder: Path, **changes: object) -> Path:
    """Write the folder as `transformers` has it, with these changes of its config.json. Padding has the model's id."""
    shutil.copytree(GOLDEN / name, folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    words = WORDS[1:]
    words.insert(values["pad_token_id"], WORDS[0])
    words += [f"word{i}" for i in range(values["vocab_size"] - len(words))]
    of_roberta = "roberta" in values["model_type"]
    for key, word in zip(("bos", "eos") if of_roberta else ("cls", "sep"), ("[CLS]", "[SEP]"), strict=True):
        values[f"{key}_token_id"] = words.index(word)
    (folder / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")
    if of_roberta:  # whose vocab.txt nobody reads
        _wordpiece(words).save(str(folder / "tokenizer.json"))
    else:
        (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return folder


def _wordpiece(words: list[str]) -> tokenizers.Tokenizer:
    ids = {word: id for id, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.add_special_tokens(WORDS[:5])
    first, last = (("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"]))
    backend.post_processor = tokenizers.processors.RobertaProcessing(last, first)
    return backend
