"""A WordPiece vocabulary that knows the letters of 30 languages, and a small BERT that reads it and makes vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hard_text import names
from small_models import random_weights

from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.families.encoder_text import wordpiece
from mlx_transformer.text.tokenizer import Tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MOST = 24
"""Tokens of a text that the BERT reads."""


def tokenizer(folder: Path, **settings: Any) -> str:
    """The text of a tokenizer.json of letters, and of beginnings and ends of words."""
    words = [word for line in names() for form in (line, line.lower()) for word in form.split()]
    letters = sorted({letter for word in words for letter in word} | set("#x!.,[]-$🎉\u1100\u1161\u11a8\u0301"))
    pieces = [word[:3] for word in words[::5]] + [f"##{word[-2:]}" for word in words[::7]] + words[::50]
    tokens = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *pieces])
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return wordpiece(folder, settings)


def bert(size: int, **ids: int) -> TransformerConfig:
    """One of so many ids."""
    sizes = dict(vocab_size=size, source_vocab_size=size, d_model=32, heads=4, d_ff=64, max_positions=2 * MOST)
    kinds = dict(norm_placement="post", activation="gelu", positions="learned", tie_embeddings="all")
    more = dict(embedding_norm=True, token_types=2, output_bias=False, scale_embeddings=False, norm_epsilon=1e-12)
    head = Head(kind="pooled", activation="tanh")
    layers = dict(encoder_layers=2, decoder_layers=0)
    return TransformerConfig(architecture="encoder", head=head, **sizes, **kinds, **more, **layers, **ids)  # type: ignore[arg-type]


def write_bert(folder: Path, text: str | None, embedding: TextEmbedding | None, **changes: int) -> Path:
    """A checkpoint of random weights. text: its tokenizer.json."""
    known = None if text is None else Tokenizer(text)
    ids = {} if known is None else dict(pad_id=known.pad_id, bos_id=known.bos_id, eos_id=known.eos_id)
    config = bert(changes.pop("size", 9000 if known is None else known.vocab_size), **{**ids, **changes})
    made: dict[str, Any] = {} if embedding is None else dict(texts=embedding.texts(), tensors=embedding.tensors())
    return save_checkpoint(folder, config, random_weights(config), text, **made, force=True)


def write_encoder(folder: Path) -> Path:
    """The BERT with such a vocabulary, which gives unit vectors of texts: the folder of its checkpoint."""
    embedding = TextEmbedding(normalize=True, max_length=MOST, prompts={"query": "q: "})
    return write_bert(folder / "model", tokenizer(folder / "words"), embedding)
