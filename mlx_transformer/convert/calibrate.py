"""Text for calibration, and second moments of the inputs of linear maps: x x^T, summed over all positions of the text.

Maps with the same input (queries, keys and values; gate and up) share their moments. A pass over the text sums those of
as many maps as fit into `MEMORY`; a later pass runs through the maps that the caller has quantised in between. MLX
multiplies, and NumPy does the rest.

Shapes: L positions, D inputs of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from mlx_transformer.data.corpus import read_text_lines
from mlx_transformer.nn.quantize import put_layers, recast
from mlx_transformer.runtime.transformer import Transformer
from mlx_transformer.system.errors import UserError

MEMORY = 1 << 30
"""Most bytes of moments at a time; a single map may need more."""
CALIBRATED, JUDGED = 16384, 8192
"""Most tokens to calibrate on, and to judge on."""
PIECE = 512
"""Longest piece of a document, in tokens."""


@dataclass(frozen=True)
class Example:
    """Ids for a pass: (ids,) of a decoder or an encoder, (source, target) with start token of an encoder-decoder.

    labels: the token after each position of the last array; empty for an encoder.
    """

    ids: tuple[list[int], ...]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.ids[-1])


def read_examples(model: Transformer, file: str | Path) -> tuple[list[Example], list[Example]]:
    """Examples to calibrate on, from every other line of a text file, and to judge on, from the rest.

    An encoder-decoder writes the targets itself. Raises `UserError` for a text with fewer than two lines, or a model
    without tokenizer.
    """
    lines = [line for line in read_text_lines(file)[0] if line.strip()]
    if model.tokenizer is None:
        raise UserError(f"{file}: {model.where} has no tokenizer to read it with")
    if len(lines) < 2:
        raise UserError(
            f"{file}: has {len(lines)} lines; give at least 2: half of them calibrate, half measure the loss"
        )
    parts = ((lines[::2], CALIBRATED), (lines[1::2], JUDGED))
    calibrating, judging = (cut(_examples(model, some), most) for some, most in parts)
    if not calibrating or not judging:
        raise UserError(f"{file}: its lines have only one token each: give longer lines")
    return calibrating, judging


def cut(examples: Iterable[Example], most: int) -> list[Example]:
    """The first examples with `most` tokens or more together; all if there are fewer tokens."""
    kept, count = [], 0
    for example in examples:
        if count >= most:
            break
        kept.append(example)
        count += len(example)
    return kept


def _examples(model: Transformer, lines: Sequence[str]) -> Iterator[Example]:
    config, tokenizer = model.config, model.tokenizer
    assert tokenizer is not None
    piece = min(PIECE, config.max_positions)
    if config.architecture == "decoder":
        for (row,) in (tokenizer.prompts([line]) for line in lines):
            for begin in range(0, len(row) - 1, piece):
                part = row[begin : begin + piece + 1]
                yield Example((part[:-1],), part[1:])
        return
    for (row,) in (tokenizer.source.encode_batch([line]) for line in lines):
        source = row[:piece]
        if config.architecture == "encoder":
            yield Example((source,), [])
        else:
            (output,) = model.generate([source])
            target = [config.bos_id, *output][: config.max_positions]
            yield Example((source, target), [*target[1:], config.eos_id])


def logits_of(model: Transformer, example: Example) -> NDArray[np.float32]:
    """(L, V)"""
    return np.array(model(*([ids] for ids in example.ids)).astype(mx.float32)[0])


Watch = Callable[[mx.array], None]


def moments(
    model: Transformer, paths: Sequence[str], examples: Sequence[Example]
) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
    """Yield (linear maps with the same input x, sum of x x^T (D, D)), in the network's order."""
    readers, widths = _readers(model, paths, examples[0])
    for part in _parts(widths):
        sums = {path: mx.zeros((widths[path], widths[path])) for path in part}

        def add(path: str, x: mx.array, sums: dict[str, mx.array] = sums) -> None:
            rows = mx.flatten(x, 0, -2).astype(mx.float32)  # (L, D)
            sums[path] = sums[path] + rows.T @ rows

        with _watching(model, part, add):
            for example in examples:
                model(*([ids] for ids in example.ids))
                mx.eval(*sums.values())  # and nothing behind these maps
        for path in part:
            yield readers[path], np.array(sums.pop(path))


def _readers(model: Transformer, paths: Sequence[str], example: Example) -> tuple[dict[str, list[str]], dict[str, int]]:
    """({first map: all maps with the same input}, {first map: the input's width}), in the order of a pass."""
    arrays: list[mx.array] = []  # kept, so that an id isn't another array's later
    first: dict[int, str] = {}
    readers: dict[str, list[str]] = {}
    widths: dict[str, int] = {}

    def note(path: str, x: mx.array) -> None:
        arrays.append(x)
        one = first.setdefault(id(x), path)
        readers.setdefault(one, []).append(path)
        widths.setdefault(one, x.shape[-1])

    with _watching(model, paths, note):
        model(*([ids] for ids in example.ids))
    return readers, widths


def _parts(widths: Mapping[str, int]) -> Iterator[list[str]]:
    part, size = list[str](), 0
    for path, width in widths.items():
        if part and size + 4 * width**2 > MEMORY:
            yield part
            part, size = [], 0
        part.append(path)
        size += 4 * width**2
    if part:
        yield part


@contextmanager
def _watching(model: nn.Module, paths: Sequence[str], see: Callable[[str, mx.array], None]) -> Iterator[None]:
    """In this context, `see` is called with the path and the input of each of these linear maps when it is used."""
    modules = dict(model.named_modules())
    plain = {path: modules[path] for path in paths}
    watched = {path: recast(layer, _watched(type(layer))) for path, layer in plain.items()}
    for path, layer in watched.items():
        layer.watch = lambda x, path=path: see(path, x)
    put_layers(model, watched)
    try:
        yield
    finally:
        put_layers(model, plain)


@cache
def _watched(kind: type[nn.Module]) -> type[nn.Module]:
    class Watched(kind):
        watch: Watch

        def __call__(self, x: mx.array) -> Any:
            self.watch(x)
            return super().__call__(x)

    return Watched
