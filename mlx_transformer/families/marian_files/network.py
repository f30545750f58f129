"""Marian's names and shapes of our parameters.

Marian's matrices are (in, out), ours (out, in); its vectors are (1, d), ours (d,). Its decoder starts with a vector of
zeros. Ours starts with a token after the vocabulary, which is padding too: its embedding is zeros, and its output bias
bans it (`BARRED`). If the source and target vocabularies differ in size, the rows between are filled in the same way.
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
"""Marian's name of the output product in names of scales, if the classifier is a tied embedding."""
ROWS = ("embedding.weight", "source_embedding.weight", "target_embedding.weight", "output_proj.weight")
"""Matrices with a row for each token."""
SUBLAYERS = {"self_attention": "self", "cross_attention": "context", "feed_forward": "ffn"}
LETTERS = {"query_proj": "q", "key_proj": "k", "value_proj": "v", "output_proj": "o", "up_proj": "1", "down_proj": "2"}
LETTERS |= {"input_proj": "", "forget_proj": "f"}
NORMS = {"self": "self_Wo", "context": "context_Wo", "ffn": "ffn_ffn", "rnn": "rnn_ffn"}


@dataclass(frozen=True)
class Place:
    """Where a parameter of ours is stored in Marian's file."""

    name: str
    transposed: bool = False
    others: tuple[str, ...] = ()
    """Names in older files, where the matrix is stored the other way round."""


def config_of(fields: Mapping[str, Any], sizes: tuple[int, int]) -> TransformerConfig:
    """Our config of a Marian model. fields: from `options.read_options`; sizes: source and target vocabulary."""
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
    """{parameter of ours: where it is stored}, for a config from `config_of`."""
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
    """Our parameters from Marian's tensors, which are read when they are needed, and all problems of the tensors.

    sizes: source and target vocabulary.
    """
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
    """Marian's tensors from our parameters, (in, out) and (1, d), without the rows after the vocabularies.

    Each tensor is computed when its values are needed.
    """
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
    """Our parameter from Marian's tensor; turned: it has the orientation of older files."""
    array = item.numbers().T if turned else item.numbers()
    if name not in ROWS and name != "output_proj.bias":
        return np.ascontiguousarray(array.T if place.transposed else array).reshape(shape)
    full = np.full(shape, BARRED if name == "output_proj.bias" else 0, np.float32)
    full[: len(array) if len(shape) == 2 else array.size] = array.reshape(-1, *shape[1:])
    return full
