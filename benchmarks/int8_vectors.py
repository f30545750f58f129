"""What int8 costs an encoder's vectors, and where: neighbours lost, by products and by ways of rounding.

    python benchmarks/int8_vectors.py PUBLISHED --text FILE

In an environment with torch and transformers; PUBLISHED is a BERT of sentence-transformers that takes the mean. Numbers
are rounded as int8 would round them and computed in float32, so that no kernel plays a part. A number has 127 steps on
either side; a scale is that of a token's row, of an output's weights, or of 32 numbers in turn (blocks). `smoothed`:
each input channel is first divided by max|x|^a / max|w|^(1-a), which the weights take up (SmoothQuant's form).
`rotated`: both are first turned by one random rotation, after which nothing sticks out: what is lost then is lost to
eight bits, and no smoothing can win it back. Lines are judged and calibrated on in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from transformers import AutoModel, AutoTokenizer  # type: ignore[import-not-found]

NEIGHBOURS, STEPS, BLOCK, BATCH = 10, 127, 32, 16
KINDS = {
    "query": "self.query",
    "key": "self.key",
    "value": "self.value",
    "output of attention": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
Turn = Callable[[Any], Any]


def rounded(x: Any) -> Any:
    """Each row in steps of its own."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / STEPS
    return (x / scale).round() * scale


def in_blocks(x: Any) -> Any:
    return rounded(x.reshape(*x.shape[:-1], -1, BLOCK)).reshape(x.shape)


class Study:
    """A model, texts, and the vectors that it gives them in float32."""

    def __init__(self, folder: Path, judged: Sequence[str], longest: int):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        self.judged, self.longest = judged, longest
        self.products = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and "pooler" not in name
        }
        self.weights = {name: module.weight.data.clone() for name, module in self.products.items()}
        self.table = self.model.embeddings.word_embeddings.weight.data.clone()
        self.exact = self.vectors()
        self.near = self.neighbours(self.exact)

    def encode(self, texts: Sequence[str]) -> tuple[Any, Any]:
        limits = {"truncation": True, "max_length": self.longest}
        given = self.tokenizer(list(texts), padding=True, return_tensors="pt", **limits)
        with torch.no_grad():
            return self.model(**given).last_hidden_state, given["attention_mask"][:, :, None]

    def vectors(self) -> Any:
        order = sorted(range(len(self.judged)), key=lambda i: len(self.judged[i]))
        found: list[Any] = [None] * len(order)
        for begin in range(0, len(order), BATCH):
            part = order[begin : begin + BATCH]
            memory, mask = self.encode([self.judged[i] for i in part])
            for i, vector in zip(part, (memory * mask).sum(1) / mask.sum(1), strict=True):
                found[i] = vector.double()
        return torch.nn.functional.normalize(torch.stack(found))

    def neighbours(self, vectors: Any) -> list[set[int]]:
        cosines = vectors @ vectors.T
        cosines.fill_diagonal_(-2)
        return [set(row) for row in cosines.topk(NEIGHBOURS).indices.tolist()]

    def largest(self, texts: Sequence[str]) -> dict[str, Any]:
        """max|x| of each channel that comes to each product."""
        found = {name: torch.zeros(weight.shape[1]) for name, weight in self.weights.items()}

        def seen(name: str) -> Callable[[Any, Any], None]:
            def note(_: Any, given: Any) -> None:  # what a hook returns would take the place of what is given
                x = given[0].abs().reshape(-1, given[0].shape[-1]).amax(0)
                found[name] = torch.maximum(found[name], x)

            return note

        hooks = [module.register_forward_pre_hook(seen(name)) for name, module in self.products.items()]
        for text in texts:
            self.encode([text])
        for hook in hooks:
            hook.remove()
        return found

    def row(self, label: str, names: Sequence[str], weight: Turn | None, x: Turn | None, turns: Any = None) -> None:
        """Print what is lost where these products' weights and inputs are rounded so. turns: {name: what happens to
        weights and to inputs before, to weights and to inputs after rounding}."""
        plain = (lambda w: w, lambda v: v, lambda w: w, lambda v: v)
        hooks = []
        for name in names:
            of_weight, of_x, weight_back, back = plain if turns is None else turns[name]
            if weight is not None:
                self.products[name].weight.data = weight_back(weight(of_weight(self.weights[name])))
            if x is not None:
                hooks.append(
                    self.products[name].register_forward_pre_hook(
                        lambda _, given, of_x=of_x, back=back: (back(x(of_x(given[0]))),)
                    )
                )
        self.say(label)
        for name in names:
            self.products[name].weight.data = self.weights[name]
        for hook in hooks:
            hook.remove()

    def say(self, label: str) -> None:
        vectors = self.vectors()
        pairs = zip(self.near, self.neighbours(vectors), strict=True)
        kept = sum(len(a & b) for a, b in pairs) / NEIGHBOURS / len(self.near)
        error = (vectors - self.exact).square().sum(1).sqrt().mean()
        print(f"| {label} | {kept:.2%} | {error:.4f} |", flush=True)


def smoothing(weights: dict[str, Any], largest: dict[str, Any], a: float) -> dict[str, Any]:
    turns = {}
    for name, weight in weights.items():
        s = largest[name].clamp_min(1e-8) ** a / weight.abs().amax(0).clamp_min(1e-8) ** (1 - a)
        turns[name] = (lambda w, s=s: w * s, lambda v, s=s: v / s, lambda w, s=s: w / s, lambda v, s=s: v * s)
    return turns


def rotation(weights: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    by_width = {w.shape[1]: torch.linalg.qr(torch.randn(w.shape[1], w.shape[1]))[0] for w in weights.values()}
    turns = {}
    for name, weight in weights.items():
        r = by_width[weight.shape[1]]
        turns[name] = (lambda w, r=r: w @ r, lambda v, r=r: v @ r, lambda w, r=r: w @ r.T, lambda v, r=r: v @ r.T)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("published", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="one text a line")
    parser.add_argument(
        "--lines", type=int, default=400, help="of the odd ones, judged; of the even ones, calibrated on"
    )
    parser.add_argument("--longest", type=int, default=256)
    options = parser.parse_args()
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
    for kind, end in KINDS.items():
        names = [name for name in every if name.endswith(end) and (kind != "down" or "attention" not in name)]
        study.row(kind, names, rounded, rounded)
    largest = study.largest(lines[::2][: options.lines])
    for a in (0.5, 0.65, 0.8):
        study.row(f"all, smoothed, a = {a}", every, rounded, rounded, smoothing(study.weights, largest, a))
    study.row("all, in blocks", every, in_blocks, in_blocks)
    study.row("weights in blocks alone", every, in_blocks, None)
    study.row("all, rotated", every, rounded, rounded, rotation(study.weights))


if __name__ == "__main__":
    main()
