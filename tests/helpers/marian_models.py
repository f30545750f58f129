"""Small Marian models with random numbers, in files of either kind, with vocabularies, shortlist and settings."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng

from mlx_transformer.core.shortlist import Shortlist, shortlist_bytes
from mlx_transformer.families.marian_files.items import (
    Item,
    float_item,
    int8_item,
    is_quantized,
    options_item,
    write_bin,
    write_npz,
)
from mlx_transformer.text.sentencepiece import CONTROL, UNKNOWN, Piece, SentencePiece, sentencepiece_bytes

LETTERS = "etaoinshrdlu"
WORDS = "▁the ▁of ▁and ▁in ▁to ▁a ▁on is at er ing ed . ,".split()
SIZES = {
    "dim-emb": 16,
    "enc-depth": 2,
    "dec-depth": 2,
    "transformer-heads": 4,
    "transformer-dim-ffn": 32,
    "dim-vocabs": [29, 29],
    "tied-embeddings-all": True,
}
STUDENT = {**SIZES, "transformer-decoder-autoreg": "rnn", "dec-cell": "ssru", "transformer-ffn-activation": "relu"}
UNTIED = {"tied-embeddings-all": False}
KINDS: dict[str, dict[str, Any]] = {
    "student": STUDENT,
    "original": SIZES,
    "pre-norm": {
        **SIZES,
        "transformer-preprocess": "n",
        "transformer-postprocess": "da",
        "transformer-postprocess-top": "n",
    },
    "pre-norm student": {
        **STUDENT,
        "transformer-preprocess": "n",
        "transformer-postprocess": "da",
        "transformer-postprocess-top": "n",
    },
    "two vocabularies": {**STUDENT, **UNTIED, "tied-embeddings": True, "dim-vocabs": [31, 29]},
    "untied": {**SIZES, **UNTIED, "dim-vocabs": [29, 31]},
    "sources tied": {**STUDENT, **UNTIED, "tied-embeddings-src": True},
}


def bin_bytes(items: Sequence[Item]) -> bytes:
    """The `.bin` of these tensors."""
    file = io.BytesIO()
    write_bin(file, items)
    return file.getvalue()


def npz_bytes(items: Sequence[Item]) -> bytes:
    """The `.npz` of these tensors."""
    file = io.BytesIO()
    write_npz(file, items)
    return file.getvalue()


def vocabulary(size: int) -> SentencePiece:
    """A unigram model with Marian's ids."""
    texts = ["▁", *LETTERS, *WORDS, *(f"<{i}>" for i in range(99))][: size - 2]
    pieces = [Piece("</s>", 0.0, CONTROL), Piece("<unk>", 0.0, UNKNOWN)]
    pieces += [Piece(text, float(np.float32(-2 - 0.1 * i))) for i, text in enumerate(texts)]
    return SentencePiece(pieces=tuple(pieces), normalizer="identity", special=(1, -1, 0, -1))


def shapes(options: dict[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of all tensors, as Marian has them."""
    d, ff, (source, target) = options["dim-emb"], options["transformer-dim-ffn"], options["dim-vocabs"]
    if options.get("tied-embeddings-all") or options.get("tied-embeddings-src"):
        yield "Wemb", (target, d)
    else:
        yield "encoder_Wemb", (source, d)
        yield "decoder_Wemb", (target, d)
    if not options.get("tied-embeddings-all") and not options.get("tied-embeddings"):
        yield "decoder_ff_logit_out_Wt", (target, d)
    yield "decoder_ff_logit_out_b", (1, target)
    pre = options.get("transformer-preprocess") == "n"
    recurrent = options.get("transformer-decoder-autoreg") == "rnn"
    norms = "_pre" if pre else ""
    for stack, depth in (("encoder", options["enc-depth"]), ("decoder", options["dec-depth"])):
        for layer in (f"{stack}_l{i}" for i in range(1, depth + 1)):
            attentions = ["self"] if stack == "encoder" else ["context"] if recurrent else ["self", "context"]
            of_norms = [f"{layer}_{name}_Wo" for name in attentions] + [f"{layer}_ffn_ffn"]
            for name in attentions:
                for letter in "qkvo":
                    yield f"{layer}_{name}_W{letter}", (d, d)
                    yield f"{layer}_{name}_b{letter}", (1, d)
            if stack == "decoder" and recurrent:
                yield from ((f"{layer}_rnn_W", (d, d)), (f"{layer}_rnn_Wf", (d, d)), (f"{layer}_rnn_bf", (1, d)))
                of_norms.append(f"{layer}_rnn" if pre else f"{layer}_rnn_ffn")
            yield from ((f"{layer}_ffn_W1", (d, ff)), (f"{layer}_ffn_b1", (1, ff)))
            yield from ((f"{layer}_ffn_W2", (ff, d)), (f"{layer}_ffn_b2", (1, d)))
            yield from ((f"{norm}_ln_{part}{norms}", (1, d)) for norm in of_norms for part in ("scale", "bias"))
        if options.get("transformer-postprocess-top") == "n":
            yield from ((f"{stack}_top_ln_{part}", (1, d)) for part in ("scale", "bias"))


def output_name(options: dict[str, Any]) -> str:
    """The matrix of the last product."""
    names = {name for name, _ in shapes(options)}
    return next(name for name in ("decoder_ff_logit_out_Wt", "decoder_Wemb", "Wemb") if name in names)


def yaml(options: dict[str, Any]) -> str:
    """The text of options, with the keys that every model has."""
    text = {True: "true", False: "false", "": '""'}
    common = {"type": "transformer", "transformer-postprocess": "dan", "transformer-preprocess": "", "version": "test"}
    lines = []
    for key, value in {**common, **options}.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"  - {each}" for each in value)]
        else:
            lines.append(f"{key}: {text[value] if isinstance(value, bool | str) and value in text else value}")
    return "\n".join(lines) + "\n"


def model_items(options: dict[str, Any], seed: int = 0, integers: bool = False, garbage: bool = True) -> list[Item]:
    """The tensors of a model, sorted, the options last. garbage: what lies behind values is not zero."""
    random = default_rng(seed)
    items = []
    for name, shape in shapes(options):
        if not is_quantized(name) or not integers:
            items.append(float_item(name, _numbers(random, name, shape)))
            continue
        items.append(int8_item(name, random.integers(-127, 128, shape), np.float32(random.uniform(60, 90))))
        output = name == output_name(options)
        if "Wemb" not in name or output:
            scale = np.float32(random.uniform(20, 40))
            own = "none" if output else name
            items.append(float_item(f"{own}_QuantMultA", np.full((1, 1), scale)))
            if output and "Wemb" in name:
                items.append(int8_item(f"{name}_QuantMultA", np.full((1, 1), 127), np.float32(127) / scale))
    items.sort(key=lambda item: item.name)
    if garbage:
        items = [_with_garbage(random, item) for item in items]
    return [*items, options_item(yaml(options))]


def write_model(folder: Path, options: dict[str, Any], seed: int = 0, integers: bool = False) -> Path:
    """A folder with a model and all that belongs to it; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    items = model_items(options, seed, integers)
    name = "model.test.intgemm.alphas.bin" if integers else "model.npz"
    (folder / name).write_bytes(bin_bytes(items) if integers else npz_bytes(items))
    source, target = options["dim-vocabs"]
    joint = "Wemb" in {item.name for item in items}
    for file, size in [("vocab.spm", target)] if joint else [("srcvocab.spm", source), ("trgvocab.spm", target)]:
        (folder / file).write_bytes(sentencepiece_bytes(vocabulary(size)))
    (folder / "lex.50.50.test.s2t.bin").write_bytes(shortlist_bytes(shortlist(source, target)))
    vocabularies = ["vocab.spm"] * 2 if joint else ["srcvocab.spm", "trgvocab.spm"]
    settings = ["relative-paths: true", "models:", f"  - {name}", "vocabs:", *(f"  - {each}" for each in vocabularies)]
    settings += ["shortlist:", "    - lex.50.50.test.s2t.bin", "    - false", "beam-size: 1", "max-length-factor: 2.5"]
    (folder / "config.test.yml").write_text("\n".join(settings) + "\n")
    return folder


def shortlist(source: int, target: int, seed: int = 0) -> Shortlist:
    random = default_rng(seed)
    lists = [np.sort(random.choice(target, random.integers(0, 5), replace=False)) for _ in range(source)]
    ends = np.cumsum([0, *(len(each) for each in lists)])
    return Shortlist(3, 5, ends.astype(np.uint64), np.concatenate(lists).astype(np.uint32))


def _numbers(random: Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Near 1 for scales of norms; for matrices so large that outputs have the size of inputs."""
    drawn = random.normal(size=shape)
    if "_ln_scale" in name:
        return 1 + 0.1 * drawn
    return drawn * (shape[0] ** -0.5 if "_W" in name and "Wemb" not in name else 1)


def _with_garbage(random: Generator, item: Item) -> Item:
    used = item.count * item.stored().dtype.itemsize + 4 * (item.multiplier != 1)
    rest = random.integers(0, 256, len(item.data) - used, dtype=np.uint8).tobytes()
    return Item(item.name, item.type, item.shape, item.data[:used] + rest)
