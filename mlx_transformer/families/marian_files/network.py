"""Marian's names of our parameters, and the forms in which it keeps them.

Matrices are (in, out) there and (out, in) here; vectors (1, d) there. Its decoder starts with a vector of zeros: here
that is a row behind the vocabulary, padding and start token in one, that no output may be (`BARRED`). Rows between the
vocabulary and that one, where the languages have unlike many, are like it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import BARRED, parameter_shapes, source_embedding_name, target_embedding_name
from mlx_transformer.system.tensors import Stored

from .items import Item

SCALE = "_QuantMultA"
OUTPUT = "none"
"""The name of the product with a tied embedding."""
ROWS = ("embedding.weight", "source_embedding.weight", "target_embedding.weight", "output_proj.weight")
"""Matrices with a row for each piece."""
SUBLAYERS = {"self_attention": "self", "cross_attention": "context", "feed_forward": "ffn"}
LETTERS = {"query_proj": "q", "key_proj": "k", "value_proj": "v", "output_proj": "o", "up_proj": "1", "down_proj": "2"}
LETTERS |= {"input_proj": "", "forget_proj": "f"}
NORMS = {"self": "self_Wo", "context": "context_Wo", "ffn": "ffn_ffn", "rnn": "rnn_ffn"}


@dataclass(frozen=True)
class Place:
    """Where a parameter is stored."""

    name: str
    transposed: bool = False
    others: tuple[str, ...] = ()
    """Names in older files, for the same, transposed."""


def config_of(fields: Mapping[str, Any], sizes: tuple[int, int]) -> TransformerConfig:
    """Return our config of a Marian model. fields: as `options.read_options` has them; sizes: of both vocabularies."""
    start = max(sizes)
    return TransformerConfig(
        **fields,
        vocab_size=start + 1,
        positions="sinusoidal_concat",
        norm_epsilon=1e-6,
        attention_bias=True,
        output_bias=True,
        pad_id=start,
        bos_id=start,
        eos_id=0,
    )


def places(config: TransformerConfig) -> dict[str, Place]:
    """Return {parameter of ours: where it is stored}, for a config of `config_of`."""
    return {name: _place(config, name) for name in parameter_shapes(config)}


def _place(config: TransformerConfig, name: str) -> Place:
    if name == "output_proj.weight":
        return Place("decoder_ff_logit_out_Wt", others=("decoder_ff_logit_out_W",))
    if name == "output_proj.bias":
        return Place("decoder_ff_logit_out_b")
    if name == source_embedding_name(config) == target_embedding_name(config):
        return Place("Wemb")
    if name in ROWS:
        return Place(f"{name.partition('_')[0].replace('source', 'encoder').replace('target', 'decoder')}_Wemb")
    stack, *parts, kind = name.split(".")
    if parts == ["norm"]:
        return Place(f"{stack}_top_ln_{_norm_part(kind)}")
    _, layer, module, *projection = parts
    sublayer = SUBLAYERS[module.removesuffix("_norm")]
    recurrent = stack == "decoder" and sublayer == "self" and config.recurrent
    sublayer = "rnn" if recurrent else sublayer
    prefix = f"{stack}_l{int(layer) + 1}_"
    if projection:
        return Place(f"{prefix}{sublayer}_{'W' if kind == 'weight' else 'b'}{LETTERS[projection[0]]}", kind == "weight")
    before = config.norm_placement == "pre"
    norm = "rnn" if recurrent and before else NORMS[sublayer]
    return Place(f"{prefix}{norm}_ln_{_norm_part(kind)}{'_pre' if before else ''}")


def _norm_part(kind: str) -> str:
    return "scale" if kind == "weight" else "bias"


def read_weights(
    config: TransformerConfig, sizes: tuple[int, int], items: Mapping[str, Item]
) -> tuple[dict[str, Any], list[str]]:
    """Return our parameters of a model's tensors, none of them read yet, and everything that is wrong with these.
    sizes: of both vocabularies."""
    weights, problems, used = {}, [], set()
    shapes = parameter_shapes(config)
    for name, place in places(config).items():
        shape = shapes[name]
        expected = _stored_shape(name, place, shape, sizes)
        stored = next((each for each in (place.name, *place.others) if each in items), None)
        if stored is None:
            problems.append(f"missing {place.name} {expected}")
            continue
        used.add(stored)
        item = items[stored]
        if item.shape != (expected if stored == place.name else expected[::-1]):
            problems.append(f"{stored} is {item.shape}, expected {expected}")
            continue
        read = partial(_ours, name, place, item, shape, stored != place.name)
        weights[name] = Stored(shape, np.dtype(np.float32), read)
    scales = {f"{name}{SCALE}" for name in (*used, OUTPUT)}
    problems += [f"unknown {name} {item.shape}" for name, item in items.items() if name not in used | scales]
    problems += [
        f"{name} is {items[name].shape}, not one number" for name in scales & items.keys() if items[name].count != 1
    ]
    return weights, problems


def written(config: TransformerConfig, sizes: tuple[int, int], weights: Mapping[str, Any]) -> dict[str, Stored]:
    """Return Marian's tensors of our parameters, (in, out) and (1, d), without the rows behind the vocabularies; each
    is made where its numbers are asked for."""
    items = {}
    shapes = parameter_shapes(config)
    for name, place in places(config).items():
        shape = shapes[name]
        expected = _stored_shape(name, place, shape, sizes)
        read = partial(_theirs, weights[name], place.transposed, expected)
        items[place.name] = Stored(expected, np.dtype(np.float32), read)
    return items


def _theirs(array: Any, transposed: bool, shape: tuple[int, ...]) -> NDArray[np.float32]:
    array = np.asarray(array, np.float32)
    array = array.T if transposed else array[: shape[-1]] if array.ndim == 1 else array[: shape[0]]
    return np.ascontiguousarray(array).reshape(shape)


def _stored_shape(name: str, place: Place, shape: tuple[int, ...], sizes: tuple[int, int]) -> tuple[int, ...]:
    pieces = sizes[0] if name == "source_embedding.weight" else sizes[1]
    if name in ROWS:
        return pieces, shape[1]
    if name == "output_proj.bias":
        return 1, pieces
    return shape[::-1] if place.transposed else (1, *shape) if len(shape) == 1 else shape


def _ours(name: str, place: Place, item: Item, shape: tuple[int, ...], turned: bool) -> NDArray[np.float32]:
    """Return a parameter of ours; turned: it stands as older files have it, transposed."""
    array = item.numbers().T if turned else item.numbers()
    if name not in ROWS and name != "output_proj.bias":
        return np.ascontiguousarray(array.T if place.transposed else array).reshape(shape)
    full = np.full(shape, BARRED if name == "output_proj.bias" else 0, np.float32)
    full[: len(array) if len(shape) == 2 else array.size] = array.reshape(-1, *shape[1:])
    return full
