"""What `transformers` makes of text with `makers_tokenizers.py`: ids, control tokens parsed and not, and text again.

PYTHONPATH=tests/helpers python tests/mlx_transformer/text/make_golden_makers.py     # transformers 4.57.6
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import transformers
from makers_tokenizers import SPECIAL, hard_texts, makers_json


def main() -> None:
    golden = {}
    for kind in SPECIAL:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tokenizer.json"
            file.write_text(makers_json(kind))
            theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False)
        golden[kind] = [
            [
                (split := theirs(text, split_special_tokens=True).input_ids),
                (parsed := theirs(text).input_ids),
                theirs.decode(split, skip_special_tokens=True),
                theirs.decode(parsed, skip_special_tokens=True),
            ]
            for text in hard_texts(kind)
        ]
    lines = (f"{json.dumps(kind)}: {json.dumps(rows, separators=(',', ':'))}" for kind, rows in golden.items())
    (Path(__file__).parent / "golden_makers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
