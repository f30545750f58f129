"""What the three shipped models show, computed by twin.js: which head looks where, and what is seen when a part is off.

PYTHONPATH=.:tests/helpers python tests/helpers/shipped_models.py writes the numbers anew, and prints them.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import twin
from imports import ROOT

from mlx_transformer.data.built_in import NOTES
from mlx_transformer.generation.heads import ids_with_masks
from mlx_transformer.text.tokenizer import Tokenizer

SHIPPED = ROOT / "export/explain/models"
GOLDEN = ROOT / "tests/export/explain/shipped.json"
TRANSLATOR, DECODER, ENCODER = "sentences", "sentences-decoder", "sentences-encoder"

TIRED = "The animal didn't cross the street because it was too tired"
WIDE = "The animal didn't cross the street because it was too wide"
RIVER, CITY = "On the river bank", "On the city bank"
ORDERS = ("The cat sat on the mat", "The mat sat on the cat")
BEGUN = ("YOUR CAT IS A LOVELY", "My fried chicken was very")
HIDDEN = ("My <mask> chicken was very good", "YOUR <mask> IS A LOVELY CAT")
PLACES = (("encoder", "self_attention"), ("decoder", "self_attention"), ("decoder", "cross_attention"))
HEADS = [[stack, layer, kind, head] for stack, kind in PLACES for layer in range(2) for head in range(4)]
SUBLAYERS = [[stack, layer, kind] for stack, kind in PLACES for layer in range(2)]
SUBLAYERS += [[stack, layer, "feed_forward"] for stack in ("encoder", "decoder") for layer in range(2)]
WHOLE = ("positions", "mask", "scale", "residual", "norm")
MEMORY = "encoder.layers.1"
TELLING = (" the", " bank", " it", " es", " sie", " Ufer", " Bank")
"""Words whose looks are told."""
LOOKED_AT = 0.3  # a weight that is worth telling


class Model:
    """One of the shipped models, with its tokenizer."""

    def __init__(self, name: str):
        self.folder = SHIPPED / name
        self.tokenizer = Tokenizer.load(self.folder / "tokenizer.json")

    def ids(self, text: str) -> list[int]:
        """With the end."""
        return ids_with_masks(self.tokenizer, text) if "<mask>" in text else self.tokenizer.encode(text)

    def words(self, ids: list[int]) -> list[str]:
        return [self.tokenizer.decode([i]) or self.tokenizer.token(i) for i in ids]

    def task(self, kind: str, **task: Any) -> dict[str, Any]:
        return {"kind": kind, "model": str(self.folder), **task}

    def read(self, text: str, output: str, names: list[str], **switches: Any) -> dict[str, Any]:
        """The task of a pass over a text and its translation."""
        target = [self.tokenizer.bos_id, *self.ids(output)[:-1]]
        return self.task("points", source=self.ids(text), target=target, switches=switches, names=names)


@cache
def model(name: str) -> Model:
    return Model(name)


def weights_names() -> list[str]:
    return [f"{stack}.layers.{layer}.{kind}.weights" for stack, kind in PLACES for layer in range(2)]


def log_p(logits: np.ndarray, written: list[int]) -> float:
    """The log probability of what is written."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    rows = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return float(rows[np.arange(len(written)), written].sum())


def bits(weights: np.ndarray) -> float:
    """The mean spread of rows of weights."""
    return float(-(weights * np.log2(np.maximum(weights, 1e-300))).sum(axis=-1).mean())


def translations(switches: dict[str, Any], texts: list[str]) -> list[tuple[str, float]]:
    """What greedy search writes, and its log probability."""
    one = model(TRANSLATOR)
    answers = twin.answers([one.task("greedy", source=one.ids(text), switches=switches) for text in texts])
    found = []
    for tokens in answers:
        ids = [token["id"] for token in tokens]
        found.append((one.tokenizer.decode(ids), sum(token["logProbability"] for token in tokens)))
    return found


def looks() -> dict[str, list[list[Any]]]:
    """{sentence: [layer and kind, head, word that asks, word that it looks at, weight]}: a decoder's word is the one
    that is written."""
    one, names = model(TRANSLATOR), weights_names()
    texts = (RIVER, CITY, TIRED, WIDE)
    found: dict[str, list[list[Any]]] = {}
    for text, points in zip(texts, twin.answers([one.read(t, NOTES[t], names) for t in texts]), strict=True):
        read, written = one.words(one.ids(text)), one.words(one.ids(NOTES[text]))
        found[text] = []
        for name, weights in twin.arrays(points).items():
            stack, _, layer, kind, _ = name.split(".")
            asking = read if stack == "encoder" else written
            columns = read if "cross" in kind or stack == "encoder" else ["<s>", *written[:-1]]
            for head, row, column in product(range(4), range(len(asking)), range(len(columns))):
                told = asking[row] in TELLING and len(columns[column]) > 2
                if told and weights[head, row, column] >= LOOKED_AT and asking[row] != columns[column]:
                    place = f"{stack} {int(layer) + 1} {kind}"
                    weight = round(float(weights[head, row, column]), 3)
                    found[text].append([place, head + 1, asking[row], columns[column], weight])
    return found


def switches() -> dict[str, Any]:
    """The numbers of the switches, on and off."""
    one, names = model(TRANSLATOR), weights_names()
    german = NOTES[TIRED]
    off = {name: {name: True} for name in WHOLE}
    other = f"{german.rpartition(' ')[0]} Katze"
    wanted = ["logits", *names]
    tasks = [one.read(TIRED, german, wanted)]
    tasks += [one.read(TIRED, german, wanted, **switch) for switch in off.values()]
    tasks += [one.read(TIRED, other, ["logits"], **switch) for switch in ({}, off["mask"])]
    tasks += [one.read(t, NOTES[t], [MEMORY], **switch) for switch in ({}, off["positions"]) for t in ORDERS]
    answers = list(map(twin.arrays, twin.answers(tasks)))
    passes = dict(zip(["on", *off], answers, strict=False))
    changed, changed_unmasked = answers[len(passes) : len(passes) + 2]
    memories = [each[MEMORY] for each in answers[len(passes) + 2 :]]
    written = one.ids(german)
    before = len(one.ids(german.rpartition(" ")[0])) - 1  # rows that read no other word
    cats = [one.words(one.ids(text)).index(" cat") for text in ORDERS]

    def moved(pair: list[np.ndarray]) -> float:
        return float(np.abs(pair[0][cats[0]] - pair[1][cats[1]]).max())

    def ahead(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
        return float(np.abs(a["logits"][:before] - b["logits"][:before]).max())

    def spread(points: dict[str, np.ndarray], part: str) -> float:
        return float(np.mean([bits(points[name]) for name in names if part in name]))

    return {
        "log p": {name: log_p(points["logits"], written) for name, points in passes.items()},
        "written": {name: translations(off.get(name, {}), [TIRED])[0] for name in passes},
        "orders": {name: translations(off.get(name, {}), list(ORDERS)) for name in ("on", "positions")},
        "memory of a word in another place": {"on": moved(memories[:2]), "positions": moved(memories[2:])},
        "earlier logits with another last word": {
            "on": ahead(passes["on"], changed),
            "mask": ahead(passes["mask"], changed_unmasked),
        },
        "bits": {
            name: {part: spread(passes[name], part) for part in ("encoder", "decoder.layers.0.self", "cross")}
            for name in ("on", "scale")
        },
    }


def parts() -> dict[str, dict[str, float]]:
    """{part that is off: {sentence: log p of its translation}}, and of the whole model."""
    one = model(TRANSLATOR)
    cases: dict[str, dict[str, Any]] = {"nothing": {}}
    cases |= {" ".join(map(str, head)): {"heads": [head]} for head in HEADS}
    cases |= {" ".join(map(str, part)): {"sublayers": [part]} for part in SUBLAYERS}
    texts = (TIRED, WIDE)
    tasks = [one.read(text, NOTES[text], ["logits"], **switch) for switch in cases.values() for text in texts]
    answers = iter(twin.answers(tasks))
    return {
        name: {text: log_p(twin.arrays(next(answers))["logits"], one.ids(NOTES[text])) for text in texts}
        for name in cases
    }


def likeliest(name: str, text: str, count: int = 3) -> list[tuple[str, float]]:
    """What a decoder writes next, or an encoder restores in place of <mask>."""
    one = model(name)
    ids = one.ids(text)
    side = {"source": ids} if name == ENCODER else {"target": [one.tokenizer.bos_id, *ids[:-1]]}
    [points] = twin.answers([one.task("points", names=["logits"], **side)])
    row = ids.index(int(one.tokenizer.mask_id or 0)) if name == ENCODER else -1
    logits = twin.arrays(points)["logits"][row]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return [(one.tokenizer.decode([int(i)]), float(p[i])) for i in np.argsort(-p)[:count]]


def temperatures() -> dict[str, float]:
    """The probability of the first German word at several temperatures."""
    one = model(TRANSLATOR)
    [points] = twin.answers([one.read(TIRED, NOTES[TIRED], ["logits"])])
    logits = twin.arrays(points)["logits"][0]
    scaled = {t: np.exp((logits - logits.max()) / float(t)) for t in ("1", "2", "4")}
    return {t: float(p.max() / p.sum()) for t, p in scaled.items()}


def facts() -> dict[str, Any]:
    notes = list(NOTES)
    found = dict(zip(notes, [text for text, _ in translations({}, notes)], strict=True))
    return {
        "translations": found,
        "looks": looks(),
        "switches": switches(),
        "parts": parts(),
        "temperatures": temperatures(),
        "next words": {text: likeliest(DECODER, text) for text in BEGUN},
        "hidden words": {text: likeliest(ENCODER, text) for text in HIDDEN},
    }


def rounded(value: Any) -> Any:
    """Numbers with four digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    text = json.dumps(rounded(facts()), ensure_ascii=False, indent=1)
    GOLDEN.write_text(text + "\n", encoding="utf-8")
    print(text)
