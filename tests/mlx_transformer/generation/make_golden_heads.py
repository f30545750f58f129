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
from transformers import (  # noqa: E402
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    BertTokenizerFast,
    pipeline,
)

TEXTS = [
    "a good film was bad and so it is not",
    "Films,  fil\u00e9 GOODS and bading. \U0001f600 not so  ",
    "\u00c0 was it? it was. word1 word12 word13 word4word5",
    "so so so so it it it was was film film good good bad bad and not is a a",
    "",
]
ASKED = [
    ["so is it good", "a good film was bad and so it is not"],
    ["not", "Films,  fil\u00e9 GOODS and bading. \U0001f600 not so  "],
    ["it was bad.", "\u00c0 was it? it was. word1 word4word5"],
    ["", "so so it was film film good bad bad and not is a a"],
]
"""Each fits in one row, where ours are the numbers of the pipeline."""


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


def answered(folder: Path) -> list[dict]:
    """The answer of each question, at its tokens."""
    theirs = published("bert-spans", folder / "spans")
    tokenizer = BertTokenizerFast(vocab_file=str(theirs / "vocab.txt"), do_lower_case=True, model_max_length=26)
    model = AutoModelForQuestionAnswering.from_pretrained(theirs)
    run = pipeline("question-answering", model, tokenizer=tokenizer)
    found = []
    for question, context in ASKED:
        features = run(question=question or " ", context=context, align_to_words=False, max_seq_len=26, doc_stride=1)
        found.append({"probability": float(features["score"]), "start": features["start"], "end": features["end"]})
    return found


if __name__ == "__main__":
    scratch = Path(tempfile.mkdtemp())
    golden = {"texts": TEXTS, "tagged": tagged(scratch), "asked": ASKED, "answered": answered(scratch)}
    shutil.rmtree(scratch)
    text = json.dumps(golden, ensure_ascii=True, indent=1) + "\n"
    (HERE / "golden_heads.json").write_text(text, encoding="utf-8")
