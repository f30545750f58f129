"""An encoder of transformers whose products and table are rounded as int8 would round them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from transformers import AutoModel, AutoTokenizer  # type: ignore[import-not-found]

NEIGHBOURS, STEPS, BLOCK, BATCH = 10, 127, 32, 16
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


def fixed(largest: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Round what comes to these products in steps of the largest number that was seen there, to others by row."""
    turns = {}
    for name, channels in largest.items():
        step = channels.amax() / STEPS
        turn = (lambda v, step=step: (v / step).round().clamp(-STEPS - 1, STEPS) * step) if name in names else rounded
        turns[name] = (lambda w: w, turn, lambda w: w, lambda v: v)
    return turns


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
