"""What int8 costs an encoder's vectors, and where: neighbours lost, by products and by ways of rounding.

    python benchmarks/int8_vectors.py PUBLISHED --text FILE

In an environment with torch and transformers; PUBLISHED is a BERT of sentence-transformers that takes the mean. Numbers
are rounded as int8 would round them and computed in float32, so that no kernel plays a part. A number has 127 steps on
either side; a scale is that of a token's row, of an output's weights, or of 32 numbers in turn (blocks). `smoothed`:
each input channel is first divided by max|x|^a / max|w|^(1-a), which the weights take up (SmoothQuant's form).
`fixed`: one scale for all that comes to a product, by the largest number that the other lines bring there.
`rotated`: both are first turned by one random rotation, after which nothing sticks out: what is lost then is lost to
eight bits, and no smoothing can win it back. Lines are judged and calibrated on in turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

KINDS = {
    "query": "self.query",
    "key": "self.key",
    "value": "self.value",
    "output of attention": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}

FIXED = {
    "query, key and value": ("query", "key", "value"),
    "output of attention": ("output of attention",),
    "attention": ("query", "key", "value", "output of attention"),
    "up": ("up",),
    "down": ("down",),
    "all": tuple(KINDS),
}
"""Products whose inputs have one scale for all rows, by what they are called together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("published", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="one text a line")
    parser.add_argument(
        "--lines", type=int, default=400, help="of the odd ones, judged; of the even ones, calibrated on"
    )
    parser.add_argument("--longest", type=int, default=256)
    options = parser.parse_args()
    import torch  # type: ignore[import-not-found]
    from engines.rounding import Study, fixed, in_blocks, rotation, rounded, smoothing

    torch.set_num_threads(1)
    lines = [line for line in options.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    study = Study(options.published, lines[1::2][: options.lines], options.longest)
    every = list(study.products)
    print("| int8 | neighbours kept | error of a unit vector |\n|-|-|-|")
    study.model.embeddings.word_embeddings.weight.data = rounded(study.table)
    study.say("table of embeddings alone")
    study.model.embeddings.word_embeddings.weight.data = study.table
    study.row("all products", every, rounded, rounded)
    study.row("their weights alone", every, rounded, None)
    study.row("their inputs alone", every, None, rounded)
    kinds = {
        kind: [name for name in every if name.endswith(end) and (kind != "down" or "attention" not in name)]
        for kind, end in KINDS.items()
    }
    for kind, names in kinds.items():
        study.row(kind, names, rounded, rounded)
    largest = study.largest(lines[::2][: options.lines])
    for label, chosen in FIXED.items():
        names = [name for kind in chosen for name in kinds[kind]]
        study.row(f"all, fixed for {label}", every, rounded, lambda x: x, fixed(largest, names))
    for a in (0.5, 0.65, 0.8):
        study.row(f"all, smoothed, a = {a}", every, rounded, rounded, smoothing(study.weights, largest, a))
    study.row("all, in blocks", every, in_blocks, in_blocks)
    study.row("weights in blocks alone", every, in_blocks, None)
    study.row("all, rotated", every, rounded, rounded, rotation(study.weights))


if __name__ == "__main__":
    main()
