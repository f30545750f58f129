"""Translate a text on many machines, with Ray Data: python ray_corpus.py MODEL TEXT OUT [WORKERS]

Each worker has the model once and takes lines by the batch; the lines of OUT are in the order of TEXT. A worker that
dies is started again, and what it had is done anew.
"""

import sys
from pathlib import Path
from typing import Any

import ray

import mlx_transformer as mt


class Translate:
    def __init__(self, model: str):
        self.model = mt.open_model(model, threads=1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"translation": self.model.translate([str(line) for line in batch["text"]], beam=4)}


def translate_corpus(model: str, text: str, out: str, workers: int = 2, of: type = Translate) -> None:
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    lines = ray.data.read_text(text, drop_empty_lines=False).repartition(4 * workers)
    pool = ray.data.ActorPoolStrategy(size=workers)
    translated = lines.map_batches(of, fn_constructor_args=(model,), batch_size=64, compute=pool, num_cpus=1)
    with Path(out).open("w", encoding="utf-8") as file:
        file.writelines(f"{row['translation']}\n" for row in translated.iter_rows())


if __name__ == "__main__":
    model, text, out, *workers = sys.argv[1:]
    translate_corpus(model, text, out, int(workers[0]) if workers else 2)
