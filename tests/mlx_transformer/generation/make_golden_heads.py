"""What the pipelines of `transformers` say with the tiny models of `tests/helpers/head_models.py`: golden_heads.json.

Runs in an environment that has transformers 4.57 and none of our packages:

    python tests/mlx_transformer/generation/make_golden_heads.py

Labels of the model that tags are those of `LABELS`, so that entities begin and go on.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "helpers"))

from head_folders import LABELS, published  # noqa: E402
from transformers import AutoModelForTokenClassification, BertTokenizerFast, pipeline  # noqa: E402

TEXTS = [
    "a good film was bad and so it is not",
    "Films,  fil\u00e9 GOODS and bading. \U0001f600 not so  ",
    "\u00c0 was it? it was. word1 word12 word13 word4word5",
    "so so so so it it it was was film film good good bad bad and not is a a",
    "",
]


def tagged(folder: Path) -> list[list[dict]]:
    """The entities of each text."""
    theirs = published("bert-tokens", folder / "tokens", id2label=LABELS)
    tokenizer = BertTokenizerFast(vocab_file=str(theirs / "vocab.txt"), do_lower_case=True)
    model = AutoModelForTokenClassification.from_pretrained(theirs)
    run = pipeline("token-classification", model, tokenizer=tokenizer, aggregation_strategy="simple")
    return [
        [
            {"label": e["entity_group"], "probability": float(e["score"]), "start": e["start"], "end": e["end"]}
            for e in (run(text) if text else [])
        ]
        for text in TEXTS
    ]


if __name__ == "__main__":
    scratch = Path(tempfile.mkdtemp())
    golden = {"texts": TEXTS, "tagged": tagged(scratch)}
    shutil.rmtree(scratch)
    text = json.dumps(golden, ensure_ascii=True, indent=1) + "\n"
    (HERE / "golden_heads.json").write_text(text, encoding="utf-8")
