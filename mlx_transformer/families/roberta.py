"""RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2020): BERT with positions counted from pad_token_id + 1.

Only tokens are counted, so padding may be on the left. No token reads the rows of the table before pad_token_id + 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .bert import BERT, OUTPUTS, SIZES
from .bert import names as bert_names
from .engine import At
from .keys import Architectures, Key, PositionRows, Special

WORDS = dict(activation="gelu", norm=True)
"""The masked-LM head; it has GELU even if the model's activation is another."""


def names(config: Any) -> dict[str, str | At]:
    """BERT's names, with RoBERTa's heads and position table."""
    kind, body = config.head.kind, "roberta."
    words, output = "roberta.embeddings.word_embeddings", {**OUTPUTS, "vocabulary": "lm_head.decoder"}
    dense = {"vocabulary": "lm_head.dense", "classes": "classifier.dense"}.get(kind, "roberta.pooler.dense")
    place = "classifier.out_proj" if kind == "classes" else output.get(kind, "classifier")
    bias = At("lm_head.bias", ("lm_head.decoder.bias",), config.tie_embeddings == "none", last=True)
    encoder = {ours: At(at.replace("bert.", body, 1)) for ours, at in bert_names(config).items() if isinstance(at, str)}
    return {
        **encoder,
        "embedding": At(words, copies=("lm_head.decoder",)) if kind == "vocabulary" else words,
        "encoder.positions": At("roberta.embeddings.position_embeddings", unread=config.pad_id + 1),
        "head_proj": dense,
        "head_norm": "lm_head.layer_norm",
        "output_proj.weight": f"{place}.weight",
        "output_proj.bias": bias if kind == "vocabulary" else f"{place}.bias",
    }


def heads(name: str) -> Architectures:
    return Architectures(
        {
            f"{name}Model": dict(kind="pooled", activation="tanh"),
            f"{name}ForMaskedLM": WORDS,
            f"{name}ForSequenceClassification": dict(kind="classes", activation="tanh"),
            f"{name}ForTokenClassification": dict(kind="token-classes"),
            f"{name}ForQuestionAnswering": dict(kind="spans"),
        }
    )


KEYS = (
    *SIZES,
    Key("pad_token_id", "pad_id", 1),
    PositionRows("max_position_embeddings", "max_positions", 512),
    Key("bos_token_id", "bos_id", 0),
    Special("eos_token_id", "eos_id", 2),
)
ROBERTA = replace(
    BERT,
    name="RoBERTa",
    model_type="roberta",
    architecture="RobertaModel",
    keys=(*KEYS, heads("Roberta")),
    names=names,
    counts_tokens=True,
    prefix="roberta.",
    ignored=("roberta.embeddings.position_ids", "roberta.pooler.dense"),
)
XLM_ROBERTA = replace(
    ROBERTA,
    name="XLM-R",
    model_type="xlm-roberta",
    architecture="XLMRobertaModel",
    keys=(*KEYS, heads("XLMRoberta")),
)
