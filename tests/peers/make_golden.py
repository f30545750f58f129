"""Write golden/: what the published models say of `lines.en`, and what is in their files. No weights.

PEERS_PYTHON=.venv-peers/bin/python PYTHONPATH=.:tests/helpers:tests/peers python tests/peers/make_golden.py

    texts.json   {pair: the judge's translations}, on a processor with AVX2
    facts.json   {pair: {"files": SHA-256 of each, "tensors": first digits of the SHA-256 of each one's values,
                 "taps": float64 numbers of the network with dequantised weights, by `marian_network.py`}}
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from published import HERE, LINES, Published, judged, published

from export.validate.origin.marian import State
from mlx_transformer.text.sentencepiece import read_sentencepiece
from mlx_transformer.text.sentencepiece_tokenizer import tokenizer_json
from mlx_transformer.text.tokenizer import Tokenizer

TAPPED, STEPS = 3, 4


def digests(model: Published) -> dict[str, Any]:
    items, _ = model.items()
    return {
        "files": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (model.model, model.vocabulary, model.shortlist)
        },
        "tensors": {
            name: hashlib.sha256(np.ascontiguousarray(item.stored()).tobytes()).hexdigest()[:16]
            for name, item in items.items()
        },
    }


def taps(model: Published, tokenizer: Tokenizer, source: str, target: str) -> dict[str, Any]:
    """The first numbers of the encoder's rows, and the three likeliest tokens of each of the first steps."""
    network = model.network("float")
    ids, forced = tokenizer.encode(source), tokenizer.encode(target)[: STEPS - 1]
    memory = network.encode(ids)
    state, steps = State(memory), []
    for token in [None, *forced]:
        logits = network.step(state, token)
        best = np.argsort(-logits)[:3]
        cells = [cell[0, :2].tolist() for cell in state.cells.values()]
        steps.append({"best": [[int(id), float(logits[id])] for id in best], "cells": cells})
    rows = {"first": memory[0, :4].tolist(), "last": memory[-1, :4].tolist(), "norm": float(np.linalg.norm(memory))}
    return {"source": ids, "forced": forced, "encoder": rows, "steps": steps}


def main() -> None:
    lines, facts, texts = LINES, {}, {}
    for pair, model in published().items():
        backend, texts[pair] = judged(model, lines)
        if backend != "avx2":
            raise SystemExit(f"the judge computes with {backend}, and other processors give other texts")
        tokenizer = Tokenizer(tokenizer_json(read_sentencepiece(model.vocabulary), ["<pad>"]))
        tapped = [taps(model, tokenizer, *each) for each in zip(lines[:TAPPED], texts[pair], strict=False)]
        facts[pair] = {**digests(model), "taps": tapped}
        lines = texts[pair]  # the other way
    for name, values in (("texts", texts), ("facts", facts)):
        text = json.dumps(values, ensure_ascii=False, indent=1) + "\n"
        (HERE / "golden" / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
