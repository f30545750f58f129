"""Bugs that `validate` has to find, each with the place where it has to show and the operation that has to be named."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mutation_edits import (
    Edit,
    after,
    attribute,
    become,
    both,
    constant,
    epsilon,
    exchanged,
    left_padding_seen,
    node,
    one_more,
    reads,
    sees,
    swap_inputs,
    untied,
    weight,
)

from mlx_transformer.spec.config import TransformerConfig

SIZES = dict(vocab_size=60, d_model=32, heads=4, d_ff=48, encoder_layers=2, decoder_layers=2, max_positions=40)
CONFIGS = {
    "paper": TransformerConfig(**SIZES, attention_bias=True, activation="gelu", tie_embeddings="target-output"),
    "modern": TransformerConfig(
        **SIZES, norm_placement="pre", norm="rmsnorm", positions="rotary", activation="silu", gated=True,
        key_value_heads=2,
    ),
    "decoder": TransformerConfig(
        **{**SIZES, "encoder_layers": 0}, architecture="decoder", tie_embeddings="target-output", positions="learned"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """`edit` goes into the ONNX graphs `files`, or `change` into the MLX model. What finds it: `weights`, parameters'
    names; `tap` on `path`, the first point over budget, and `culprit`, how the operation's sentence goes on after it;
    `search`, a kind of tokens. Empty: that kind of check sees nothing (or, of tokens, needn't)."""

    edit: Edit | None = None
    change: Callable[[Any], None] | None = None
    model: str = "paper"
    files: str = "*"
    weights: str = ""
    tap: str = ""
    path: str = "tapped"
    culprit: str = ""
    search: str = ""

    @property
    def runtime(self) -> str:
        return "mlx" if self.edit is None else "onnxruntime"


def swap_heads(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(4, 8, -1)[[1, 0, 2, 3]].reshape(rows.shape)


def one_bit(array: np.ndarray) -> np.ndarray:
    array.reshape(-1).view(np.uint32)[5] ^= 1
    return array


def one_zero(array: np.ndarray) -> np.ndarray:
    array[3, 4] = 0
    return array


def without_bias(n: Any) -> None:
    del n.input[2]


E0, E1, D0, D1 = "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"
e0, e1, d0, d1 = (name.replace(".", "/", 1) for name in (E0, E1, D0, D1))
PAST = "decoder_with_past*"
SQRT_D = 32**0.5

ONNX = {
    # Weights
    "value bias times .99": Mutation(
        weight(f"{E1}.self_attention.value_proj.bias", lambda x: x * 0.99),
        weights=f"{E1}.self_attention.value_proj.bias",
        tap=f"{E1}.self_attention", culprit="value projection",
    ),
    "one weight zero": Mutation(
        weight(f"{D0}.feed_forward.up_proj.weight", one_zero),
        weights=f"{D0}.feed_forward.up_proj.weight", tap=f"{D0}.feed_forward", culprit="up projection",
    ),
    "key bias dropped": Mutation(
        weight(f"{E1}.self_attention.key_proj.bias", np.zeros_like), weights=f"{E1}.self_attention.key_proj.bias"
    ),
    "weights rounded to float16": Mutation(
        weight(f"{D1}.cross_attention.query_proj.weight", lambda x: x.astype(np.float16)),
        weights=f"{D1}.cross_attention.query_proj.weight",
        tap=f"{D1}.cross_attention", culprit="query projection",
    ),
    "two heads swapped": Mutation(
        weight(f"{D0}.self_attention.query_proj.weight", swap_heads),
        weights=f"{D0}.self_attention.query_proj.weight", tap=f"{D0}.self_attention", culprit="query projection",
    ),
    "one bit of one weight": Mutation(
        weight(f"{E1}.feed_forward.down_proj.weight", one_bit), weights=f"{E1}.feed_forward.down_proj.weight"
    ),
    "a projection transposed": Mutation(
        weight(f"{D0}.cross_attention.output_proj.weight", np.transpose),
        weights=f"{D0}.cross_attention.output_proj.weight",
        tap=f"{D0}.cross_attention", culprit="output projection",
    ),
    "a projection used untransposed": Mutation(
        node("Transpose", f"{E0}.self_attention.query_proj.weight", become("Identity")),
        tap=f"{E0}.self_attention", culprit="query projection",
    ),
    "another layer's weights": Mutation(
        reads(f"{D1}.self_attention.value_proj.weight/", f"{D1}.self_attention.value_proj.weight",
              f"{D0}.self_attention.value_proj.weight"),
        tap=f"{D1}.self_attention", culprit="value projection", files="decoder_model",
    ),
    "tied matrix untied and rounded": Mutation(
        untied("target_embedding.weight", lambda x: x.astype(np.float16)), tap="logits", culprit="classifier"
    ),
    "up and gate exchanged": Mutation(
        exchanged(f"{d0}/feed_forward", "up_proj", "gate_proj"), model="modern",
        tap=f"{D0}.feed_forward", culprit="activation (gate and up exchanged)",
    ),
    # Norms and residuals
    "norm epsilon 1e-6 for 1e-5": Mutation(
        node("LayerNormalization", f"{e0}/feed_forward_norm", epsilon(1e-6)),
        tap=E0, culprit="layer norm (epsilon 1e-06, not 1e-05)",
    ),
    "RMS norm epsilon 1e-6 for 1e-5": Mutation(
        constant(1e-5, 1e-6, f"{d1}/feed_forward_norm"), model="modern",
        tap=f"{D1}.feed_forward", culprit="RMS norm (epsilon 1e-06, not 1e-05)",
    ),
    "norm without its bias": Mutation(
        node("LayerNormalization", f"{d0}/self_attention_norm", without_bias),
        tap=f"{D0}.cross_attention", culprit="layer norm (the bias is missing)",
    ),
    "final norm left out": Mutation(
        reads("embedding/", "decoder.norm", D1), model="modern", tap="logits", culprit="classifier"
    ),
    "no residual around one sub-layer": Mutation(
        node("Add", f"{e1}/Add", lambda n: n.input.__setitem__(0, n.input[1])),
        tap=f"{E1}.feed_forward", culprit="residual connection (the sub-layer's output is added to itself)",
    ),
    "residual from the wrong layer": Mutation(
        reads(f"{e1}/Add", E0, "encoder.embedding"), tap=f"{E1}.feed_forward", culprit="residual connection"
    ),
    # Embedding and positions
    "positions + 1e-6": Mutation(
        weight("positions.sinusoids", lambda x: x + 1e-6), tap="encoder.embedding", culprit="positions"
    ),
    "positions off by one": Mutation(
        weight("positions.sinusoids", lambda x: np.roll(x, -1, axis=0)), files="encoder*",
        tap="encoder.embedding", culprit="positions",
    ),
    "positions of steps off by one": Mutation(
        one_more(1, -1)("Gather", "decoder/positions"), files=PAST,
        tap="decoder.embedding", path="cached, tapped", culprit="positions",
    ),
    "learned positions off by one": Mutation(
        one_more(1, -1)("Gather", "decoder/positions"), model="decoder", tap="decoder.embedding", culprit="positions"
    ),
    "embedding scale a little off": Mutation(
        constant(SQRT_D, float(np.nextafter(np.float32(SQRT_D), np.float32(9))), "Mul"), files="encoder*",
        tap="encoder.embedding", culprit="embedding scale",
    ),
    "embedding not scaled": Mutation(
        constant(SQRT_D, 1.0, "Mul"), files="encoder*", tap="encoder.embedding", culprit="embedding scale",
    ),
    "the neighbour's row of the embedding": Mutation(
        one_more(1, -1)("Gather", "source_embedding/"), files="encoder*",
        tap="encoder.embedding", culprit="embedding row",
    ),
    "rotary sine from the table of cosines": Mutation(
        reads("decoder/Gather", "positions.sin", "positions.cos"), model="modern", files="decoder_model",
        tap=f"{D0}.self_attention", culprit="",
    ),
    # Masks
    "padding not masked": Mutation(
        constant(-1e9, 0.0, "Where"), files="encoder*", tap=f"{E0}.self_attention",
        culprit="mask and softmax (mask: query ",
    ),
    "padding on the left not masked": Mutation(
        left_padding_seen, files="encoder*", tap=f"{E0}.self_attention", culprit="mask and softmax (mask: query ",
    ),
    "source padding not masked in the decoder": Mutation(
        node("Where", "Where_node_4", lambda n: n.input.__setitem__(2, n.input[1])), files=PAST,
        tap=f"{D0}.cross_attention", path="cached, tapped", culprit="mask and softmax (mask: query ",
    ),
    "causal mask wrong at one position": Mutation(
        sees(query=1, key=2), files="decoder_model", tap=f"{D0}.self_attention",
        culprit="mask and softmax (mask: query 1 sees key 2 of row 0, which is masked)",
    ),
    "causal mask without the diagonal": Mutation(
        node("LessOrEqual", "", become("Less")), files="decoder_model",
        tap=f"{D0}.self_attention", culprit="mask and softmax (mask: query ",
    ),
    "no causal mask at all": Mutation(
        node("LessOrEqual", "", become("GreaterOrEqual")), files="decoder_model",
        tap=f"{D0}.self_attention", culprit="mask and softmax (mask: query ",
    ),
    "prompt's padding not masked": Mutation(
        node("And", "", become("Or")), model="decoder", tap=f"{D0}.self_attention",
        culprit="mask and softmax (mask: query ",
    ),
    # Attention and feed-forward
    "no scale in one attention": Mutation(
        constant(8**-0.5, 1.0, f"{d1}/self_attention"), files="decoder_model",
        tap=f"{D1}.self_attention", culprit="scores: Q K^T / sqrt(d_k) (every value times 2.828",
    ),
    "scale 1 / d_k": Mutation(
        constant(8**-0.5, 1 / 8, f"{e0}/self_attention"), files="encoder*",
        tap=f"{E0}.self_attention", culprit="scores: Q K^T / sqrt(d_k) (every value times 0.353553",
    ),
    "softmax over the queries": Mutation(
        node("Softmax", f"{d1}/cross_attention", attribute(axis=-2)), files="decoder_model",
        tap=f"{D1}.cross_attention", culprit="mask and softmax",
    ),
    "query heads exchanged": Mutation(
        after("Transpose", f"{e1}/self_attention/Transpose", "Gather", np.array([1, 0, 2, 3]), at=2, axis=1),
        files="encoder*", tap=f"{E1}.self_attention",
        culprit="queries: heads split, rotary positions (heads 0 and 1 exchanged)",
    ),
    "grouped heads in another order": Mutation(
        both(
            after("Transpose", f"{d0}/self_attention/Transpose", "Gather", np.array([1, 0]), at=0, axis=1),
            after("Transpose", f"{d0}/self_attention/Transpose", "Gather", np.array([1, 0]), at=1, axis=1),
        ),
        model="modern", files="decoder_model", tap=f"{D0}.self_attention", culprit="",
    ),
    "gelu in its tanh form": Mutation(
        node("Gelu", e1, become("Gelu", approximate="tanh")),
        tap=f"{E1}.feed_forward", culprit="activation (gelu_tanh, not gelu)",
    ),
    "relu for gelu": Mutation(
        node("Gelu", d0, become("Relu")), files="decoder_model",
        tap=f"{D0}.feed_forward", culprit="activation (relu, not gelu)",
    ),
    "tanh for the sigmoid in silu": Mutation(
        node("Sigmoid", e1, become("Tanh")), model="modern", tap=f"{E1}.feed_forward", culprit="activation",
    ),
    # Cache
    "cache in the wrong order": Mutation(
        node("Concat", d1, swap_inputs), files=PAST,
        tap=f"{D1}.self_attention", path="cached, tapped", culprit="keys: ",
    ),
    "prompt's cache in the wrong order": Mutation(
        node("Concat", d1, swap_inputs), model="decoder",
        tap=f"{D1}.self_attention", path="cached, tapped", culprit="keys: ",
    ),
    "another layer's cache": Mutation(
        reads(d1, "past_key_values.1.decoder.value", "past_key_values.0.decoder.value"), files=PAST,
        tap=f"{D1}.self_attention", path="cached, tapped", culprit="values: ",
    ),
    "another layer's keys of the source": Mutation(
        reads(d1, "past_key_values.1.encoder.key", "past_key_values.0.encoder.key"), files=PAST,
        tap=f"{D1}.cross_attention", path="cached, tapped", culprit="scores: ",
    ),
    "a mistake in the merged graph alone": Mutation(
        node("Concat", d1, swap_inputs), files="*merged*",
        tap=f"{D1}.self_attention", path="cached, merged, tapped", culprit="keys: ",
    ),
}  # fmt: skip


def _epsilon(model: Any) -> None:
    model.decoder.layers[1].cross_attention_norm.epsilon = 1e-6


def _one_bit(model: Any) -> None:
    projection = model.decoder.layers[0].self_attention.key_proj
    projection.weight = type(projection.weight)(one_bit(np.array(projection.weight)))


def _stale_row(model: Any) -> None:
    step = model.step

    def stale(ids: Any, cache: Any, **named: Any) -> Any:
        logits = step(ids, cache, **named)
        cache.layers[1].keys[:, :, 0] = 0
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


def _swapped_modules(model: Any) -> None:
    layer = model.decoder.layers[1]
    layer.self_attention, layer.cross_attention = layer.cross_attention, layer.self_attention


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
    "padding not masked in one layer": Mutation(
        change=_no_mask, tap=f"{E1}.self_attention", culprit="mask and softmax (mask: query "
    ),
    "stale cache row": Mutation(
        change=_stale_row, tap=f"{D1}.self_attention", path="cached, tapped", culprit="keys: ", search="greedy"
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
