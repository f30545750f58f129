"""Vocabularies with tokens that their maker added, as transformers 4 and 5 save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.families.folder import read_tokenizer

GOLDEN = Path(__file__).parents[1] / "mlx_transformer" / "families" / "golden_tokens"
FOLDERS = sorted(folder.relative_to(GOLDEN).as_posix() for folder in GOLDEN.glob("v*/*"))
ENCODERS = ("bert", "distilbert", "roberta", "xlm-roberta", "modernbert")
STARTS = dict.fromkeys(("t5", "mt5", "umt5", "pegasus", "marian"), "pad")
STARTS |= dict.fromkeys(("bart", "mbart", "m2m_100"), "eos")


def has_decoder(name: str, where: Path = GOLDEN) -> bool:
    return json.loads((where / name / "config.json").read_text(encoding="utf-8"))["model_type"] not in ENCODERS


def golden(name: str, where: Path = GOLDEN) -> tuple[dict[str, Any], str, TransformerConfig]:
    """A folder's facts, the text of our tokenizer.json of it, and a config that it fits."""
    folder = where / name
    facts, kind = (json.loads((folder / file).read_text(encoding="utf-8")) for file in ("texts.json", "config.json"))
    model_type, special = kind["model_type"], facts["special"]
    facts |= {"name": name, "model_type": model_type}
    encoder = model_type in ENCODERS
    ends = (special["cls"], special["sep"]) if encoder else (special[STARTS[model_type]], special["eos"])
    more = dict(architecture="encoder", decoder_layers=0, head={"kind": "hidden"}) if encoder else {}
    sizes = dict(vocab_size=facts["size"] + 110, d_model=8, pad_id=special["pad"], bos_id=ends[0], eos_id=ends[1])
    config = TransformerConfig.from_dict({**sizes, **more})
    text, notes = read_tokenizer(folder, config, model_type)
    assert text is not None, notes
    return facts, text, config
