"""What the walk through a model draws, held to the arrays that it is drawn from: digits, strips, colours, tables, what
is said of a cell that is pointed at, and what follows from other numbers, computed once more."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from imports import ROOT

from mlx_transformer.core.positions import rotary_frequencies

WITHIN = 1e-6
"""Of a number, or of 1 where it is less."""


def short(value: float, digits: int = 3) -> str:
    """As `short` of the page's kit.js writes a number."""
    if value == -math.inf:
        return "−∞"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e5 or size < 5e-4:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = f"{mantissa}e{int(exponent):+d}"
    else:
        text = repr(float(f"{value:.{digits + (size >= 100)}g}")).removesuffix(".0")
    return text.replace("-", "−")


def written(text: str, value: float, fewest: int) -> bool:
    """Whether a text is a number in as many digits or more; halves may go either way."""
    return any(text == short(value * near, digits) for digits in range(fewest, 10) for near in (1, 1 - 1e-9, 1 + 1e-9))


def read(text: str) -> tuple[float, float]:
    """A number that is drawn, and what its digits leave open."""
    number = text.replace("−", "-")
    digits, _, exponent = number.partition("e")
    places = max(len(digits.lstrip("-").replace(".", "").lstrip("0")), 3)
    value = float(number)
    return value, 0.5 * 10 ** (math.floor(math.log10(abs(value))) - (1 if exponent else places - 1)) if value else 5e-4


def hold_texts(pairs: Sequence[Sequence[Any]]) -> None:
    for text, value, fewest in pairs:
        number = float(value.replace("Infinity", "inf"))
        if fewest != "term":
            assert written(text, number, fewest), (text, value)
        elif "·" in text:  # two factors, rounded
            (a, open_a), (b, open_b) = (read(factor) for factor in text.removesuffix(" = ").split("·"))
            assert abs(a * b - number) <= 1.01 * (abs(a) * open_b + abs(b) * open_a + open_a * open_b) + 1e-9, text


def shades_of(values: Sequence[float], most: float, power: float = 1.0) -> tuple[list[int], list[bool]]:
    """Per cent of the colour, and whether a cell is notched."""
    shares = [(abs(value) / most if most else 0.0) ** power for value in values]
    return [math.floor(100 * share + 0.5) for share in shares], [
        value < 0 and share >= 0.02 for value, share in zip(values, shares, strict=True)
    ]


def hold_colours(shades: Sequence[tuple[str, str]], rows: Sequence[Sequence[float]], most: float, power: float) -> None:
    for (colours, marks), values in zip(shades, rows, strict=True):
        drawn = re.findall(r"var\(--(plus|minus)\) ?(\d+)%", colours)
        wanted, notched = shades_of(values, most, power)
        assert all(abs(int(per_cent) - want) <= 1 for (_, per_cent), want in zip(drawn, wanted, strict=True)), values
        assert [side == "minus" for side, _ in drawn] == [value < 0 for value in values]
        inked = [mark.startswith("var(--ink)") for mark in re.findall(r"(?:var\(--ink\)|#0000|rgba?\([^)]*\)) ", marks)]
        assert (inked or [False] * len(values)) == notched


OF_ONE = ("+ place", "divided", "undivided")


def hold_strips(strips: Sequence[dict[str, Any]]) -> None:
    faded = [strip for strip in strips if re.match(r".* × ‹", strip.get("label", ""))]
    for strip in strips:
        if "label" not in strip:  # a map of weights: a power of each is its colour
            rows = [list(map(float, row)) for row in strip["rows"]]
            hold_colours(strip["shades"], rows, 1.0, 0.5)
            assert written(strip["said"].rpartition(", ")[2], max(rows[strip["lit"]]), 3)
            continue
        values = list(map(float, strip["values"]))
        label = strip["label"]
        said = f"{label}: {len(values)} numbers from {short(min(values))} to {short(max(values))}"
        assert strip["said"] == said
        most, width = np.abs(values).max(), 64
        if strip in faded or (label in OF_ONE and strip["point"] is None):  # of all values together; of a sine, a share
            most = read(strip["ends"].removeprefix("±"))[0]
            assert most >= 0.995 * np.abs(values).max()
        else:
            assert strip["ends"] == f"±{short(most)}"
        hold_colours(strip["shades"], [values[n : n + width] for n in range(0, len(values), width)], most, 1.0)
        cells = strip["table"][1:]
        assert strip["table"][0] == label
        assert len(cells) == len(values)
        assert all(written(cell, value, 4) for cell, value in zip(cells, values, strict=True))


def hold_worked(worked: Sequence[Sequence[Any]]) -> None:
    """The examples that belong to no model."""
    waves = [f(p * speed) for p in range(4) for speed in (1.0, 0.01) for f in (math.sin, math.cos)]
    first, unscaled = (float(softmax(np.array(scores))[0]) for scores in ([14.0, 12.0], [112.0, 96.0]))
    for section, cells, said in worked:
        if section == "position":
            assert cells == ["", *(short(wave, 4) for wave in waves)][-len(cells) :]
            assert [f"{wave:.5f}"[1:] for wave in waves[4:8]] == re.findall(r"\.\d{5}", said)
            assert re.findall(r"\.\d{4}(?!\d)", said) == [f"{math.floor(waves[4] * 1e4) / 1e4}"[1:]]
        else:
            assert cells[-6:] == ["112", "14", short(first, 6), "96", "12", short(1 - first, 6)]
            assert re.findall(r"0\.\d+", said) == [short(first, 6), short(unscaled, 9)]
    assert {section for section, *_ in worked} >= {"cell"}


@dataclass(frozen=True)
class Look:
    """Where one looks in a pass."""

    points: Mapping[str, np.ndarray]
    parameters: Mapping[str, np.ndarray]
    config: Any
    written: Sequence[int]
    """Ids of the output, or of the text where a model has none."""
    scored: Sequence[tuple[int, int]]
    """Rows of the logits, and ids, whose log p counts."""
    types: Sequence[int]
    """The kind of each token, where there are two texts."""
    elsewhere: Mapping[str, Any]
    """What follows from other passes: see `Elsewhere`."""
    state: Mapping[str, Any]

    @property
    def stack(self) -> str:
        return self.state["stack"] or self.config.architecture

    @property
    def row(self) -> int:
        return self.state["word" if self.stack == "encoder" else "step"]

    @property
    def out(self) -> int:
        return self.state["word" if self.config.architecture == "encoder" else "step"]

    @property
    def layer(self) -> str:
        return f"{self.stack}.layers.{self.state['layer']}"


def softmax(row: np.ndarray) -> np.ndarray:
    powers = np.exp(row - row.max())
    return powers / powers.sum()


def _cell(look: Look, part: str) -> dict[str, Any]:
    cross = part == "cross_attention"
    stack = "decoder" if cross else look.stack
    name = f"{stack}.layers.{look.state['layer']}.{part}"
    head, i = look.state["head"], look.state["step"] if cross else look.row
    key = look.state["cross" if cross else "key"]
    q, keys = look.points[f"{name}.queries"][head, i], look.points[f"{name}.keys"]
    k = keys[head // (len(look.points[f"{name}.queries"]) // len(keys)), key]
    weights = look.points[f"{name}.weights"][head, i]
    some = weights[weights > 0]
    powers = weights / weights.max()
    return {
        "qk": q @ k,
        "row": weights.sum(),
        "bits": -(some * np.log2(some)).sum(),
        "total": powers.sum(),
        "products": q * k,
        "": look.config.attention_scale or 1,
        **{f"e {n}": power for n, power in enumerate(powers)},
        **random_row(16),
    }


def random_row(width: int, keys: int = 8, draws: int = 20) -> dict[str, Any]:
    """A random query over random keys: its weights with and without the division, and their mean gradients."""
    state = 1

    def share() -> float:
        nonlocal state
        state = (state * 1664525 + 1013904223) % 2**32
        return (state + 0.5) / 2**32

    def normal() -> Iterator[float]:
        while True:
            size, turn = math.sqrt(-2 * math.log(share())), 2 * math.pi * share()
            yield size * math.cos(turn)
            yield size * math.sin(turn)

    numbers = normal()
    rows = []
    for _ in range(draws):
        query, *others = (np.array([next(numbers) for _ in range(width)]) for _ in range(keys + 1))
        scores = np.array([query @ other for other in others])
        rows.append([softmax(scores / math.sqrt(width)), softmax(scores)])
    gradients = np.mean([[(row * (1 - row)).sum() for row in each] for each in rows], axis=0)
    found: dict[str, Any] = {f"random {n}": row.max() for n, row in enumerate(rows[0])}
    found |= {f"gradient {n}": each for n, each in enumerate(gradients)}
    return found | dict(zip(("divided", "undivided"), rows[0], strict=True))


def _norm(look: Look, part: str) -> dict[str, Any]:
    name = f"{look.layer}.{part}"
    post = look.config.norm_placement == "post"
    parts = ["self_attention", *(["cross_attention"] if f"{look.layer}.cross_attention.weights" in look.points else [])]
    order = [*parts, "feed_forward"]
    at, n = order.index(part), look.state["layer"]
    start = f"{look.stack}.embedding{'_norm' if look.config.embedding_norm else ''}"
    before = f"{look.stack}.layers.{n - 1}" if n else start
    stream = before if at == 0 else f"{look.layer}.{order[at - 1]}{'_norm' if post else '.residual'}"
    read = look.points[f"{name}.residual" if post else stream][look.row]
    return _steps_of_norm(look, read, f"{name}_norm")


def _steps_of_norm(look: Look, read: np.ndarray, name: str) -> dict[str, Any]:
    mean = 0.0 if look.config.norm == "rmsnorm" else read.mean()
    deviation = math.sqrt(((read - mean) ** 2).mean() + look.config.norm_epsilon)
    gamma, beta = (look.parameters.get(f"{name}.{side}") for side in ("weight", "bias"))
    scaled = (read - mean) / deviation
    found = {"mean": mean, "deviation": deviation, "read": read[0], "scaled": scaled[0]}
    found |= {"− μ": read - mean, "÷ σ": scaled}
    found |= {} if gamma is None else {"gamma": gamma[0], "γ, learned": gamma}
    return found | ({} if beta is None else {"beta": beta[0], "β, learned": beta})


def _position(look: Look) -> dict[str, Any]:
    name = f"{look.stack}.embedding"
    config, found = look.config, {}
    first = look.points[f"{name}.{'scaled' if f'{name}.scaled' in look.points else 'rows'}"][look.row]
    kinds = look.parameters.get("token_type_embedding.weight")
    type = look.types[look.row] if look.types else 0
    kind = None if kinds is None else np.asarray(kinds).reshape(-1, config.d_model)[type]
    added = look.points[name][look.row] - first - (0 if kind is None else kind)
    found |= {"place": added[0], "+ place": added}
    if kind is not None:
        found |= {"kind": kind[0], f"+ kind of token: {('first', 'second')[type]} text": kind}
    if config.embedding_norm:
        found |= _steps_of_norm(look, look.points[name][look.row], f"{name}_norm")
    if config.positions == "rotary":
        found["turn of each pair, in radians"] = look.row * rotary_frequencies(config.of(look.stack))
    for column in range(config.d_model if config.positions == "sinusoidal" else 0):
        speed = 10000 ** (-2 * (column // 2) / config.d_model)
        found |= {f"speed {column}": speed, f"turn {column}": 2 * math.pi / speed, f"wave {column}": added[column]}
    return found


def _next(look: Look) -> dict[str, Any]:
    config, found = look.config, {}
    layers = config.encoder_layers if look.stack == "encoder" else config.decoder_layers
    start = f"{look.stack}.embedding{'_norm' if config.embedding_norm else ''}"
    last = [f"{look.stack}.norm"] if f"{look.stack}.norm" in look.points else []
    for n, name in enumerate([start, *(f"{look.stack}.layers.{n}" for n in range(layers)), *last]):
        rows = look.points[name]
        apart = math.sqrt(((rows - rows.mean(axis=0)) ** 2).sum() / (rows**2).sum())
        found |= {f"apart {n}": apart, f"length {n}": float(np.linalg.norm(rows[look.row]))}
    return found


def _broken(look: Look) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, mark in (("encoder", "encoder.*self"), ("decoder", "decoder.*self"), ("cross-attention", "cross")):
        rows = [value.reshape(-1, value.shape[-1]) for name, value in look.points.items()
                if name.endswith(".weights") and re.search(mark, name)]  # fmt: skip
        spread = [-(row[row > 0] * np.log2(row[row > 0])).sum() for each in rows for row in each]
        found |= {f"bits-{kind}": np.mean(spread), f"bits-{kind}-off": np.mean(spread)} if spread else {}
    log_p = sum(np.log(softmax(look.points["logits"][row])[id]) for row, id in look.scored)
    return found | dict.fromkeys(("log-p", "log-p-off", "right", "right-off"), log_p)


def _logits(look: Look) -> dict[str, Any]:
    made = [value for name, value in look.points.items() if re.fullmatch(r"text\.(pooled|dense\.\d+)", name)]
    found: dict[str, Any] = {"text length": np.linalg.norm(made[-1])} if made else {}
    rows = look.points["logits"]
    row = rows[min(look.out, len(rows) - 1)]
    if look.config.head.kind == "vocabulary":
        return found | {f"p {id}": p for id, p in enumerate(softmax(row))}
    if look.config.head.labels:
        return found | {f"share {n}": share for n, share in enumerate(softmax(row))}
    cosines = rows @ row / np.linalg.norm(rows, axis=1) / np.linalg.norm(row)
    return found | {f"cosine {n}": each for n, each in enumerate(cosines)} | {"length": np.linalg.norm(row)}


def recomputed(section: str, look: Look) -> dict[str, Any]:
    """What follows from the arrays, by its name in a station."""
    if section == "row":
        return {"root": math.sqrt(look.config.d_model)}
    if section == "position":
        return _position(look)
    if section in ("cell", "cross"):
        return _cell(look, "self_attention" if section == "cell" else "cross_attention")
    if section == "norm":
        return _norm(look, "self_attention")
    if section == "feed-forward":
        inner = look.points[f"{look.layer}.feed_forward.inner"][look.row]
        return _norm(look, "feed_forward") | {"zeros": 100 * (inner == 0).mean()}
    if section == "next":
        return _next(look)
    if section == "logits":
        return _logits(look)
    if section == "training":
        told = json.loads((ROOT / "export/explain/walk/training.json").read_text(encoding="utf-8"))
        looks = {when: max(told[when][0]) for when in ("before", "after")}
        return {"first": told["losses"][0], "last": told["losses"][-1], "guess": math.log(9), **looks}
    if section == "search":
        return {f"step {t}": softmax(look.points["logits"][t])[id] for t, id in enumerate(look.written)}
    return _broken(look) if section == "break" else {}


Passes = Callable[[Sequence[int], Sequence[int]], Mapping[str, np.ndarray]]
"""Points of a pass over ids of a source and of what is written."""


def elsewhere(run: Passes, config: Any, source: Sequence[int], written: Sequence[int], given: int) -> dict[str, Any]:
    """What the page says of passes over other ids: how far a word moves with its place, and earlier logits with a later
    word; and the numbers of a beam search by `""`, of which the best score. given: ids that are not searched."""
    found: dict[str, Any] = {}
    if config.has_encoder and len(source) > 2:
        memory = f"encoder.layers.{config.encoder_layers - 1}"
        whole, turned = (run(ids, written)[memory] for ids in (source, [*source[-2::-1], source[-1]]))
        found |= dict.fromkeys(("moved", "moved-off"), np.abs(whole[0] - turned[len(source) - 2]).max())
    if config.architecture == "encoder":
        return found
    if len(written) > 2:
        whole, other = (run(source, ids)["logits"] for ids in (written, [*written[:-2], written[0], written[-1]]))
        rows = len(written) - 2
        found |= dict.fromkeys(("ahead", "ahead-off"), np.abs(whole[:rows] - other[:rows]).max())
    numbers, best = grown(run, config, source, written[:given])
    return found | {"": numbers, "score": best}


def grown(
    run: Passes, config: Any, source: Sequence[int], prefix: Sequence[int], beam: int = 4
) -> tuple[np.ndarray, float]:
    """Log p of every beginning that a beam search weighs and scores of those that end; and the best score."""
    limit, finished, numbers = (len(source) if config.has_encoder else 0) + 50, [], []
    read = run(source, [*prefix, config.eos_id])["logits"]  # what is given counts too
    live = [(float(sum(np.log(softmax(read[t])[id]) for t, id in enumerate(prefix))), [*prefix])]

    def score(log_p: float, length: int) -> float:
        return log_p / ((5 + length) / 6) ** 0.6

    for length in range(len(prefix) + 1, limit + 1):
        found = []
        for log_p, ids in live:
            logits = run(source, [*ids, config.eos_id])["logits"][len(ids)]
            row = logits.astype(np.float32) - np.log(np.exp(logits).sum())  # a step's logits are float32
            row[[config.pad_id, config.bos_id]] = -np.inf
            found += [(log_p + row[token], [*ids, int(token)]) for token in np.argsort(-row)[: 2 * beam]]
        weighed = sorted(found, key=lambda each: -each[0])[: 2 * beam]
        ended = [log_p for log_p, ids in weighed[:beam] if length == limit or ids[-1] == config.eos_id]
        live = [each for each in weighed if each[1][-1] != config.eos_id][:beam]
        finished = sorted([*finished, *(score(log_p, length) for log_p in ended)], reverse=True)[:beam]
        numbers += [log_p for log_p, _ in weighed] + [score(log_p, length) for log_p in ended]
        if len(finished) == beam and finished[-1] >= score(live[0][0], limit):
            break
    return np.array(numbers), finished[0]


def hold_search(numbers: Sequence[float], wanted: np.ndarray) -> int:
    """Each number of the tree is of the search, and none is missing."""
    gaps = np.abs(np.array(numbers)[:, None] - wanted) / np.maximum(1, np.abs(wanted))
    assert max(gaps.min(axis=0).max(), gaps.min(axis=1).max()) <= WITHIN
    return len(numbers)


def hold_derived(look: Look) -> int:
    """Return how many numbers were compared."""
    count = 0
    for section, numbers, strips in look.state["named"]:
        wanted = recomputed(section, look)
        wanted |= look.elsewhere if section in ("search", "break") else {}
        tree = [float(value) for name, value in numbers if section == "search" and not name]
        count += hold_search(tree, look.elsewhere[""]) if tree else 0
        for name, value in [*numbers, *strips]:
            if section == "search" and not name:
                continue
            assert name in wanted, (section, name)
            found = np.array(value, dtype=np.float64)
            assert np.abs(found - wanted[name]).max() <= WITHIN * max(1, np.abs(wanted[name]).max()), (section, name)
            count += found.size
    return count


def hold_drawn(shown: Mapping[str, Any], points: Mapping[str, np.ndarray], config: Any, parameters: Mapping[str, Any],
               written: Sequence[int], scored: Sequence[tuple[int, int]] = (),
               types: Sequence[int] = (), elsewhere: Mapping[str, Any] | None = None) -> int:  # fmt: skip
    """Hold all that is drawn of a text to the arrays of a pass. Return how many numbers were compared."""
    count = 0
    for point, values in shown["numbers"].items():
        for index, value in values.items():
            expected = points[point][tuple(map(int, index.split(",")))]
            found = -math.inf if value is None else value  # JSON has no infinity
            assert found == expected or abs(found - expected) <= WITHIN * max(1, abs(expected)), (point, index)
            count += 1
    hold_texts(shown["pairs"])
    hold_strips(shown["strips"])
    assert shown["rest"] == [], "a number that stands for none of the arrays"
    hold_worked(shown["worked"])
    for state in shown["states"]:
        count += hold_derived(Look(points, parameters, config, written, scored, types, elsewhere or {}, state))
    return count
