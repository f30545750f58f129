"""Write lines.world: 1,000 lines in the scripts of 30 languages, of every length that all-MiniLM-L6-v2 reads.

In this project's environment, with a folder of the model for its tokenizer, then `make_minilm_golden.py`:

    PYTHONPATH=tests/helpers python tests/peers/make_world_lines.py FOLDER_OF_THE_MODEL

Lines hold names of languages and places, a line's from one language, as many of them as fit its length, filled up with
the word "a"; two are longer than what is read, and most are short, as the time goes into the long ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import tokenizers
from hard_text import LANGUAGES, names

HERE = Path(__file__).parent
LONGEST, LINES = 256, 1000


def main(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    random, given = Random(0), names()
    each = len(given) // len(LANGUAGES)
    lengths = [*range(2, LONGEST + 1), LONGEST + 1, LONGEST + 90]
    lengths += [random.randint(3, 24) for _ in range(LINES - len(lengths))]
    lines = []
    for i, length in enumerate(lengths):
        first = i % len(LANGUAGES) * each
        line, room = "", length - 2  # beside the tokens before and behind it
        while room:
            name = random.choice(given[first : first + each])
            longer = f"{line}, {name}" if line else name
            if (taken := len(tokenizer.encode(longer).ids) - 2) > length - 2:
                longer = f"{line} a".strip()
                taken = len(tokenizer.encode(longer).ids) - 2
            line, room = longer, length - 2 - taken
        lines.append(line)
    random.shuffle(lines)
    assert {len(tokenizer.encode(line).ids) for line in lines} >= set(range(2, LONGEST + 1))
    (HERE / "lines.world").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
