"""Bugs in MLX models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from mutations import D0, D1, E0, E1, Mutation, one_bit


def _epsilon(model: Any) -> None:
    model.decoder.layers[1].cross_attention_norm.epsilon = 1e-6


def _one_bit(model: Any) -> None:
    projection = model.decoder.layers[0].self_attention.key_proj
    projection.weight = type(projection.weight)(one_bit(np.array(projection.weight)))


def _stale_row(model: Any) -> None:
    step = model.step

    def stale(ids: Any, cache: Any, **named: Any) -> Any:
        logits = step(ids, cache, **named)
        cache.layers[1].buffers[0][:, :, 0] = 0
        return logits

    model.step = stale


def _starting(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Every cache of the model is changed when it is made."""

    def mutate(model: Any) -> None:
        start = model.start

        def changed(*inputs: Any, **named: Any) -> Any:
            cache = start(*inputs, **named)
            change(cache)
            return cache

        model.start = changed

    return mutate


def _config(**values: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.config = dataclasses.replace(model.config, **values)

    return change


def _length_penalty(model: Any) -> None:
    search = model.search
    model.search = lambda ids, **options: search(ids, **options, length_penalty=0.7)


def _no_mask(model: Any) -> None:
    layer = model.encoder.layers[1]

    class Unmasked(type(layer)):
        def __call__(self, x: Any, mask: Any = None, *inputs: Any, **named: Any) -> Any:
            return super().__call__(x, None, *inputs, **named)

    layer.__class__ = Unmasked


def _tanh(model: Any) -> None:
    from mlx_transformer.nn.feedforward import gelu_tanh

    model.encoder.layers[0].feed_forward.activation = gelu_tanh


def _pre_norm(model: Any) -> None:
    model.encoder.layers[1].pre_norm = True


def _norm_of_the_sum(model: Any) -> None:
    layer = model.decoder.layers[0]

    class Summed(type(layer)):
        def around(self, name: str, x: Any, sublayer: Callable[[Any], Any]) -> Any:
            return self[f"{name}_post_norm"](x + sublayer(self[f"{name}_norm"](x)))

    layer.__class__ = Summed


def _rectified_state(model: Any) -> None:
    from mlx_transformer.nn.feedforward import relu

    step = model.step

    def rectified(ids: Any, cache: Any, **named: Any) -> Any:
        logits = step(ids, cache, **named)
        cache.layers[0].state = relu(cache.layers[0].state)
        return logits

    model.step = rectified


MLX = {
    "norm epsilon 1e-6 for 1e-5": Mutation(
        change=_epsilon, tap=f"{D1}.feed_forward", culprit="layer norm (epsilon 1e-06, not 1e-05)"
    ),
    "one bit of one weight": Mutation(change=_one_bit, weights=f"{D0}.self_attention.key_proj.weight"),
    "dropout left on": Mutation(
        change=lambda model: model.train(),
        tap=f"{E0}.self_attention", culprit="dropout (the model is in training mode)",
    ),
    "gelu in its tanh form": Mutation(
        change=_tanh, tap=f"{E0}.feed_forward", culprit="activation (gelu_tanh, not gelu)"
    ),
    "norm in front of the sub-layers": Mutation(change=_pre_norm, tap=f"{E1}.self_attention", culprit="residual conn"),
    "heads normalised after the rotation, not before": Mutation(
        change=lambda model: setattr(model.encoder.layers[1].self_attention, "norm_place", "after"),
        model="normed heads", tap=f"{E1}.self_attention", culprit="keys: heads split, rotary positions",
    ),
    "the second norm after the sum, not before": Mutation(
        change=_norm_of_the_sum, model="normed heads", tap=f"{D0}.cross_attention", culprit="residual conn",
    ),
    "padding not masked in one layer": Mutation(
        change=_no_mask, tap=f"{E1}.self_attention", culprit="mask and softmax (mask: query "
    ),
    "stale cache row": Mutation(
        change=_stale_row, tap=f"{D1}.self_attention", path="cached, tapped", culprit="keys: ", search="greedy"
    ),
    "the state kept after the ReLU": Mutation(
        change=_rectified_state, model="ssru",
        tap=f"{D0}.self_attention", path="cached, tapped", culprit="states: ", search="beam 4",
    ),
    "positions of steps off by one": Mutation(
        change=_starting(lambda cache: setattr(cache, "offset", 1)),
        tap="decoder.embedding", path="cached, tapped", culprit="positions",
    ),
    "source padding not masked in the cache": Mutation(
        change=_starting(lambda cache: setattr(cache, "cross_mask", None)),
        tap=f"{D0}.cross_attention", path="cached, tapped", culprit="mask and softmax (mask: query ",
    ),
    "beams not reordered": Mutation(
        change=_starting(lambda cache: setattr(cache, "reorder", lambda rows: None)), search="beam 4"
    ),
    "another start token": Mutation(change=_config(bos_id=5), search="greedy"),
    "wrong pad id": Mutation(change=_config(pad_id=7), search="sampling"),
    "wrong end token": Mutation(change=_config(eos_id=9), search="sampling"),
    "another length penalty": Mutation(change=_length_penalty, search="beam 4"),
}  # fmt: skip
