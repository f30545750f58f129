"""The data of a page about a sentence, as JSON, for a model or two models side by side. Arrays are base64 text, with as
many bits per number as fit into the page.

pieces      texts of tokens by position: of the source, of the written tokens, and of the tokens read by the decoder
sides       {"source" and "target": token numbers read by a stack, by position}
maps        attention weights of each kind, layer and head; for two models also their difference
steps       for each position the most likely tokens, and the token actually next
lens        for each layer and position the classifier's most likely tokens there
norms       norms of the vectors at each point of the network and each position
beam        the tree of a beam search
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.validate.opening import Opened
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_count
from mlx_transformer.generation.alignment import alignment_layer, words_of
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .sentence import ExplainedSentence, Trace, gives_words, most_likely, norms, probabilities, written_by

FINE, COARSE = 16, 8
"""Bits per attention weight: four decimals, or two."""

ROOM = {FINE: 700_000, COARSE: 2_400_000}
"""Most characters of all maps together, by bits per weight: the page stays under 3 MB."""
LENS_TOP = 3
NAMES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}
SIDES = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}
"""For each kind of attention, the sides of its queries and of its keys."""
NAMED = {"encoder": ("source", "source"), "decoder": ("target", "read"), "cross": ("target", "source")}
"""The `pieces` that label a map's rows and columns. A query of the decoder is labelled by the token written from it, a
key by the token read."""


@dataclass
class Texts:
    """The text of each token, by number: its id, or, in a separate source vocabulary, the size of the target's plus its
    id."""

    tokenizer: Tokenizer
    by_number: dict[int, str] = field(default_factory=dict)

    def add(self, ids: Iterable[int], side: str = "target") -> list[int]:
        """Add ids, and return their numbers."""
        own = side == "source" and self.tokenizer.separate
        tokenizer, first = (self.tokenizer.source, self.tokenizer.vocab_size) if own else (self.tokenizer, 0)
        listed = [int(id) for id in ids]
        for id in listed:
            if first + id not in self.by_number:
                self.by_number[first + id] = token_text(tokenizer, id)
        return [first + id for id in listed]

    def words(self, ids: Sequence[int], side: str) -> list[int | None]:
        return words_of(self.tokenizer.source if side == "source" else self.tokenizer, ids)


SIGNS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
"""Visible signs for control characters; the page has its own signs for line ends and tabs."""
SPECIAL = {"<s>": "start", "</s>": "end", "<pad>": "padding", "<unk>": "unknown", "<mask>": "▢"}


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """A token as people read it, never raw bytes. An id beyond the tokenizer's becomes "#id", e.g. of padding rows in
    published models."""
    if id >= tokenizer.vocab_size:
        return f"#{id}"
    if id in tokenizer.special_ids:
        return SPECIAL.get(tokenizer.token(id), tokenizer.token(id))
    text = tokenizer.decode([id]).translate(SIGNS)
    if "\ufffd" in text:
        return "part of a character"
    readable = text.replace("\n", " ").replace("\t", " ").isprintable()
    return text if text and readable else tokenizer.token(id)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Texts of these tokens. Tokens that only together make a character show it with their share of its bytes, e.g. "’
    1/3"."""
    texts: list[str] = []
    while len(texts) < len(ids):
        begin = len(texts)
        end = next((i for i in range(begin + 1, len(ids) + 1) if _whole(tokenizer, ids[begin:i])), begin + 1)
        run = ids[begin:end]
        if len(run) == 1:
            texts.append(token_text(tokenizer, run[0]))
            continue
        text, shares = tokenizer.decode(list(run)), [_bytes(tokenizer.token(id)) for id in run]
        texts += [f"{text} {share}/{sum(shares)}" for share in shares]
    return texts


def _whole(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    return "\ufffd" not in tokenizer.decode(list(ids))


def _bytes(token: str) -> int:
    """Bytes in a token holding part of a character: one per letter, or one for <0xE2>."""
    return 1 if token.startswith("<0x") else len(token)


def content(
    models: Sequence[Opened], sentence: ExplainedSentence, traces: Sequence[Trace], top_k: int
) -> dict[str, Any]:
    """Return everything for the page. Raises UserError if the page would be too large."""
    first = models[0]
    config, texts = first.config, Texts(first.tokenizer)
    stack = written_by(config)
    words = traces if gives_words(config) else []
    steps = [_steps(trace, sentence, texts, top_k) for trace in words]
    of_target = {"positions": "target"} if config.has_decoder else {"positions": "source"}
    data: dict[str, Any] = {
        "model": first.folder.resolve().name,
        "facts": _facts(config),
        "architecture": config.architecture,
        "recurrent": config.recurrent,
        "runtimes": _labels(models),
        "text": sentence.text,
        "output": sentence.output,
        "given": sentence.prompted,
        "score": None if sentence.score is None else rounded([sentence.score])[0],
        "sides": {
            side: {"ids": texts.add(ids, side), "words": texts.words(ids, side)}
            for side, ids in (("source", sentence.source), ("target", sentence.target))
            if ids
        },
        "written": texts.add(sentence.written),
        "pieces": {
            "source": pieces(first.tokenizer.source, sentence.source),
            "target": pieces(first.tokenizer, sentence.written),
            "read": pieces(first.tokenizer, sentence.target),
        },
        "maps": _maps(traces),
        "layer": alignment_layer(config) if "cross" in traces[0].weights else None,
        "steps": {**of_target, "of": steps},
        "lens": {**of_target, "stack": stack, "of": [_lens(trace, texts) for trace in words]},
        "norms": [{name: rounded(values) for name, values in norms(trace.points).items()} for trace in traces],
        "beam": _beam(sentence, texts) if sentence.tree else None,
    }
    return data | {"texts": texts.by_number}


def _facts(config: TransformerConfig) -> str:
    layers = " + ".join(str(n) for n in (config.encoder_layers, config.decoder_layers) if n)
    sizes = [f"{layers} layers", f"{config.heads} heads", f"d = {config.d_model}", f"{config.vocab_size:,} tokens"]
    return ", ".join([*sizes, f"{parameter_count(config):,} parameters"])


def _labels(models: Sequence[Opened]) -> list[str]:
    """The runtime of each model, with folder names if these differ."""
    labels = [model.label for model in models]
    names = [model.folder.resolve().name for model in models]
    return [f"{name}: {label}" for name, label in zip(names, labels, strict=True)] if len(set(names)) > 1 else labels


def _maps(traces: Sequence[Trace]) -> dict[str, Any]:
    cells = sum(_seen(weights).size for weights in traces[0].weights.values())
    tokens = max(max(weights.shape[2:]) for weights in traces[0].weights.values())
    bits = bits_for(cells, len(traces), tokens)
    kinds = {}
    for kind, weights in traces[0].weights.items():
        rows, columns = SIDES[kind]
        kinds[kind] = {
            "name": NAMES[kind],
            "rows": rows,
            "columns": columns,
            "named": NAMED[kind],
            "shape": list(weights.shape),
            "values": [packed(trace.weights[kind], bits) for trace in traces],
        }
        if len(traces) == 2:
            kinds[kind]["difference"] = packed_difference(weights, traces[1].weights[kind])
    return {"bits": bits, "kinds": kinds}


def _steps(trace: Trace, sentence: ExplainedSentence, texts: Texts, top_k: int) -> list[dict[str, Any]]:
    """For each position the most likely ids and their probabilities, and the probability and rank (from 1) of the token
    that follows."""
    p = probabilities(trace.logits)
    best = most_likely(p, top_k)
    rows = []
    for i, (row, ids, written) in enumerate(zip(p, best, sentence.written, strict=True)):
        rank = 1 + int((row > row[written]).sum())
        likeliest = {"ids": texts.add(ids), "p": rounded(row[ids]), "written": rounded([row[written]])[0], "rank": rank}
        rows.append(likeliest | {"given": i < sentence.prompted})
    return rows


def _lens(trace: Trace, texts: Texts) -> list[dict[str, Any]]:
    """For each layer its name, and for each position the most likely ids with their probabilities."""
    layers = []
    for name, logits in trace.lens.items():
        p = probabilities(logits)
        best = most_likely(p, LENS_TOP)
        ids = [texts.add(row) for row in best]
        layers.append({"name": name, "ids": ids, "p": [rounded(p[i, row]) for i, row in enumerate(best)]})
    return layers


def _beam(sentence: ExplainedSentence, texts: Texts) -> dict[str, Any]:
    tree = sentence.tree
    return {
        "step": [node.step for node in tree],
        "parent": [node.parent for node in tree],
        "token": texts.add(node.token for node in tree),
        "log_p": rounded(np.array([node.log_p for node in tree])),
        "fate": "".join(node.fate[0] for node in tree),  # k: kept, f: finished, d: dropped
        "score": [None if node.score is None else rounded([node.score])[0] for node in tree],
    }


def bits_for(cells: int, models: int, tokens: int) -> int:
    """Choose the bits per weight for `cells` weights of each model on one page.

    tokens: for the message. Raises UserError if even the fewest bits don't fit.
    """
    for bits, room in ROOM.items():
        if _characters(cells, models, bits) <= room:
            return bits
    most = int(tokens * (ROOM[COARSE] / _characters(cells, models, COARSE)) ** 0.5)
    raise UserError(
        f"{tokens} tokens make a page of more than 3 MB with this model: shorten the text to about {most} tokens"
    )


def _seen(maps: NDArray) -> NDArray:
    """All cells of maps (layers, H, L, S), or those up to the diagonal if no row looks ahead."""
    rows, columns = maps.shape[-2:]
    ahead = rows != columns or np.triu(maps, 1).any()
    return maps if ahead else maps[(..., *np.tril_indices(rows))]


def packed(weights: NDArray[np.float32], bits: int) -> str:
    """Weights between 0 and 1 as integers of `bits` bits, little-endian, in base64."""
    steps = np.rint(np.clip(_seen(weights).astype(np.float64), 0, 1) * (2**bits - 1))
    return in_base64(steps.astype("<u2" if bits == FINE else "u1").tobytes())


def packed_difference(first: NDArray[np.float32], second: NDArray[np.float32]) -> dict[str, Any]:
    """Pack second - first of two models' weights (layers, H, L, S).

    Returns {"largest": the largest magnitude per map (layers, H), "values": each map relative to its largest magnitude,
    as signed bytes in base64}.
    """
    difference = second.astype(np.float64) - first
    largest = np.abs(difference).max(axis=(2, 3))
    parts = np.rint(difference / np.where(largest, largest, 1)[:, :, None, None] * 127).astype(np.int8)
    return {"largest": [rounded(row) for row in largest], "values": in_base64(_seen(parts).tobytes())}


def rounded(values: Any) -> list[float]:
    """Round each number to four significant digits."""
    return [float(f"{value:.4g}") for value in np.asarray(values, np.float64).ravel()]


def _characters(cells: int, models: int, bits: int) -> int:
    each = models * bits // 8 + (models > 1)
    return -(-cells * each * 4 // 3)


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
