"""Ids and texts of added tokens on thousands of lines, as transformers 4 and 5 have them, against ours.

    python tests/mlx_transformer/families/make_golden_tokens.py FOLDER 2000     # in the environments that it names
    PYTHONPATH=.:tests/helpers .venv/bin/python tests/peers/tokens.py FOLDER

Prints a line for each vocabulary, and examples of what differs: by us, and by `tokenizers` with our tokenizer.json.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import tokenizers
from golden_tokens import golden

from mlx_transformer.families.folder import tokenizer_config
from mlx_transformer.text.tokenizer import Tokenizer


def compare(name: str, folder: Path, examples: int = 3) -> bool:
    facts, text, config = golden(name, folder)
    ours, texts = Tokenizer(text), facts["texts"]
    ids = ours.source.encode_batch(texts)
    decoded = ours.decode_batch(facts["ids"])
    wrong = [i for i, (mine, theirs) in enumerate(zip(ids, facts["ids"], strict=True)) if mine != theirs]
    unlike = [i for i, (mine, theirs) in enumerate(zip(decoded, facts["decoded"], strict=True)) if mine != theirs]
    library = ""
    if "lookup" not in json.loads(text)["post_processor"]["mlx_transformer"]:
        backend = tokenizers.Tokenizer.from_str(text)
        backend.encode_special_tokens = tokenizer_config(config, text)["split_special_tokens"]
        differing = sum(each.ids != mine for each, mine in zip(backend.encode_batch(texts), ids, strict=True))
        library = f"; {differing} by the library"
    print(f"{name}: {len(texts)} lines, {len(wrong)} with other ids, {len(unlike)} with another text{library}")
    for i in wrong[:examples]:
        print(f"    {texts[i]!r:.80}\n      ours {_apart(ids[i], facts['ids'][i])}")
    for i in unlike[:examples]:
        print(f"    {decoded[i]!r:.80} is {facts['decoded'][i]!r:.80}")
    return not wrong and not unlike


def _apart(mine: list[int], theirs: list[int]) -> str:
    first = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    return f"{mine[max(0, first - 2) : first + 4]} for {theirs[max(0, first - 2) : first + 4]}, from {first}"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    names = sorted(path.parent.relative_to(place).as_posix() for path in place.glob("v*/*/texts.json"))
    raise SystemExit(0 if all(list(map(partial(compare, folder=place), names))) else 1)
