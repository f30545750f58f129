"""Bugs in ONNX graphs and their weights."""

from typing import Any

import numpy as np
from mutation_edits import (
    after,
    attribute,
    become,
    both,
    bounded_after_the_mask,
    constant,
    epsilon,
    exchanged,
    feeding,
    integers,
    left_padding_seen,
    node,
    one_more,
    pooled_over_padding,
    reads,
    sees,
    swap_inputs,
    untied,
    weight,
)
from mutations import D0, D1, E0, E1, Mutation, one_bit


def swap_heads(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(4, 8, -1)[[1, 0, 2, 3]].reshape(rows.shape)


def one_zero(array: np.ndarray) -> np.ndarray:
    array[3, 4] = 0
    return array


def in_pairs(rows: np.ndarray) -> np.ndarray:
    """Of each head's rows for the 4 channels that are turned, (0, 2), (1, 3) beside each other."""
    return rows.reshape(4, 8, -1)[:, [0, 2, 1, 3, 4, 5, 6, 7]].reshape(rows.shape)


def without_bias(n: Any) -> None:
    del n.input[2]


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
    "norm epsilon times 10 in the cached decoder alone": Mutation(
        node("LayerNormalization", f"{d1}/feed_forward_norm", epsilon(1e-4)), files=PAST,
        tap=D1, path="cached, tapped", culprit="layer norm (epsilon 0.0001, not 1e-05)",
        attribute=f"decoder_with_past_model: {d1}/feed_forward_norm/",
    ),
    "norm epsilon a little off in the cached decoder alone, which no number tells": Mutation(
        node("LayerNormalization", f"{d1}/feed_forward_norm", epsilon(1.01e-5)), files=PAST,
        attribute=f"decoder_with_past_model: {d1}/feed_forward_norm/",
    ),
    "scale of one attention a last bit off in the cached decoder alone, which no number tells": Mutation(
        constant(8**-0.5, float(np.nextafter(np.float32(8**-0.5), np.float32(9))), f"{d1}/cross_attention/Mul"),
        files=PAST, attribute=f"decoder_with_past_model: {d1}/cross_attention/Mul",
    ),
    "a mask of -1e6 for -1e9, which no number tells": Mutation(
        constant(-1e9, -1e6, "Where"), files=PAST, attribute="decoder_with_past_model: Where",
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
    "the second norm of one sub-layer left out": Mutation(
        node("Add", f"{e1}/Add", lambda n: n.input.__setitem__(1, f"{E1}.self_attention")), model="normed heads",
        tap=f"{E1}.feed_forward", culprit="residual connection",
    ),
    "one sub-layer's output not scaled": Mutation(
        constant(0.25, 1.0, f"{e1}/Mul_"), model="normed heads",
        tap=f"{E1}.feed_forward", culprit="residual connection", attribute=f"encoder_model: {e1}/Mul",
    ),
    "residual from the wrong layer": Mutation(
        reads(f"{e1}/Add", E0, "encoder.embedding"), tap=f"{E1}.feed_forward", culprit="residual connection"
    ),
    "norm of the embedding left out": Mutation(
        reads(e0, "encoder.embedding_norm", "encoder.embedding"), model="normed embedding",
        tap=f"{E0}.self_attention", culprit="",
    ),
    "norm epsilon of the embedding 1e-6 for 1e-5": Mutation(
        node("LayerNormalization", "decoder/embedding_norm", epsilon(1e-6)), model="normed embedding",
        tap="decoder.embedding_norm", culprit="layer norm (epsilon 1e-06, not 1e-05)",
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
    "the mask taken for the token types": Mutation(
        reads("token_type_embedding/", "token_type_ids", "attention_mask"), model="token types",
        tap="encoder.embedding", culprit="token types and positions",
    ),
    "far keys for near ones": Mutation(
        node("LessOrEqual", "encoder/positions", become("GreaterOrEqual")), model="near keys",
        tap=f"{E1}.self_attention", culprit="mask and softmax",
    ),
    "a layer turned by the base of the others": Mutation(
        reads("encoder/positions/Gather", "positions.1.cos", "positions.cos"), model="near keys",
        tap=f"{E1}.self_attention", culprit="queries",
    ),
    "a window of one key more": Mutation(
        one_more(1, -1)("Greater", "decoder/positions"), model="long texts", tap=f"{D1}.self_attention",
        culprit="mask and softmax (mask: query ",
    ),
    "short frequencies in long texts": Mutation(
        reads("decoder/positions/Gather", "positions.long.cos", "positions.cos"), model="long texts",
        tap=f"{D0}.self_attention", culprit="queries",
    ),
    "long frequencies in a text of the last short length": Mutation(
        one_more(1, -1)("Less", "decoder/positions"), model="long texts", tap=f"{D0}.self_attention",
        culprit="queries",
    ),
    "halves of the keys swapped": Mutation(
        node("Concat", f"{d1}/self_attention/Concat", swap_inputs), model="long texts", tap=f"{D1}.self_attention",
        culprit="keys: heads split, rotary positions",
    ),
    "keys turned the other way": Mutation(
        node("Sub", f"{d0}/self_attention/Sub", become("Add")), model="long texts", tap=f"{D0}.self_attention",
        culprit="keys: heads split, rotary positions",
    ),
    "keys left in the order of pairs, as GGUF has them": Mutation(
        weight(f"{D0}.self_attention.key_proj.weight", in_pairs), model="long texts",
        weights=f"{D0}.self_attention.key_proj.weight", tap=f"{D0}.self_attention", culprit="key projection",
    ),
    "w taken for 1 + w": Mutation(
        weight(f"{D1}.feed_forward_norm.weight", lambda x: x - 1), model="long texts",
        weights=f"{D1}.feed_forward_norm.weight", tap=f"{D1}.feed_forward", culprit="RMS norm",
    ),
    "the weight of the norm before a sub-layer taken behind it": Mutation(
        reads(f"{d0}/self_attention_post_norm", f"{D0}.self_attention_post_norm.weight",
              f"{D0}.self_attention_norm.weight"),
        model="normed heads", files="decoder_model", tap=f"{D0}.cross_attention",
        culprit=f"{D0}.self_attention_post_norm: layer norm",
    ),
    "embedding scale a little off": Mutation(
        constant(SQRT_D, float(np.nextafter(np.float32(SQRT_D), np.float32(9))), "Mul"), files="encoder*",
        tap="encoder.embedding", culprit="embedding scale",
    ),
    "embedding scaled by the root, not the number": Mutation(
        constant(5.5, SQRT_D, "Mul"), files="encoder*", model="normed heads",
        tap="encoder.embedding", culprit="embedding scale (every value times 1.02", attribute="encoder_model: Mul",
    ),
    "embedding not scaled": Mutation(
        constant(SQRT_D, 1.0, "Mul"), files="encoder*", tap="encoder.embedding", culprit="embedding scale",
    ),
    "the neighbour's row of the embedding": Mutation(
        one_more(1, -1)("Gather", "source_embedding/"), files="encoder*",
        tap="encoder.embedding", culprit="embedding row",
    ),
    "rotary sine from the table of cosines": Mutation(
        reads("decoder/positions/Gather", "positions.sin", "positions.cos"), model="modern", files="decoder_model",
        tap=f"{D0}.self_attention", culprit="",
    ),
    "relative positions off by one": Mutation(
        integers("positions.buckets", lambda x: np.roll(x, 1)), model="relative", files="encoder*",
        tap=f"{E0}.self_attention", culprit="mask and softmax",
    ),
    "keys after the query as if before it": Mutation(
        integers("positions.buckets", lambda x: np.minimum(x, x[::-1])), model="relative", files="encoder*",
        tap=f"{E0}.self_attention", culprit="mask and softmax",
    ),
    "relative positions of steps off by one": Mutation(
        integers("positions.causal_buckets", lambda x: np.roll(x, 1)), model="relative", files=PAST,
        tap=f"{D0}.self_attention", path="cached, tapped", culprit="mask and softmax",
    ),
    "a number of the table of relative positions": Mutation(
        weight("decoder.positions.weight", lambda x: x * 1.001), model="relative",
        weights="decoder.positions.weight", tap=f"{D0}.self_attention", culprit="mask and softmax",
    ),
    # Masks
    "padding not masked": Mutation(
        constant(-1e9, 0.0, "Where"), files="encoder*", tap=f"{E0}.self_attention",
        culprit="mask and softmax (mask: query ",
    ),
    "padding on the left not masked": Mutation(
        left_padding_seen, files="encoder*", tap=f"{E0}.self_attention", culprit="mask and softmax (mask: query ",
    ),
    "padding pooled in a text's vector": Mutation(
        pooled_over_padding, model="text's vector", tap="sentence_embedding", path="plain",
    ),
    "source padding not masked in the decoder": Mutation(
        feeding("Where", f"{d0}/cross_attention", lambda n: n.input.__setitem__(2, n.input[1])), files=PAST,
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
    "epsilon of the queries' norm 1e-6 for 1e-5": Mutation(
        constant(1e-5, 1e-6, f"{d1}/self_attention/query_norm"), model="normed heads", files="decoder_model",
        tap=f"{D1}.self_attention", culprit="RMS norm of each head's queries (epsilon 1e-06, not 1e-05)",
    ),
    "scores divided by sqrt(d_k) where nothing divides them": Mutation(
        constant(1.0, 8**-0.5, f"{d0}/cross_attention"), model="scaled", files="decoder_model",
        tap=f"{D0}.cross_attention", culprit="scores: Q K^T times 1 (every value times 0.353553",
    ),
    "logits not scaled": Mutation(
        constant(0.25, 1.0, "Mul"), model="scaled", tap="logits", culprit="classifier (every value times 4"
    ),
    "scores not bounded": Mutation(
        node("Tanh", f"{d0}/self_attention/score_cap/", become("Identity")), model="decoder",
        tap=f"{D0}.self_attention", culprit="scores: Q K^T / sqrt(d_k), bounded by 0.5",
    ),
    "scores bounded after the mask": Mutation(
        bounded_after_the_mask(f"{d0}/self_attention"), model="decoder",
        tap=f"{D0}.self_attention", culprit="scores: Q K^T / sqrt(d_k), bounded by 0.5",
    ),
    "the bound of scores a last bit off, which no number tells": Mutation(
        constant(0.5, float(np.nextafter(np.float32(0.5), np.float32(9))), f"{d1}/self_attention/score_cap/Div"),
        model="decoder", attribute=f"model: {d1}/self_attention/score_cap/Div",
    ),
    "logits not bounded": Mutation(
        node("Tanh", "logit_cap/", become("Identity")), model="normed embedding", tap="logits",
        culprit="classifier",
    ),
    "logits bounded by another number": Mutation(
        constant(3.0, 3.1, "logit_cap/"), model="normed embedding", tap="logits", culprit="classifier",
        attribute="decoder_model: logit_cap/",
    ),
    "the bound of logits a last bit off in the cached decoder alone, which no number tells": Mutation(
        constant(3.0, float(np.nextafter(np.float32(3), np.float32(9))), "logit_cap/Div"), model="normed embedding",
        files=PAST, attribute="decoder_with_past_model: logit_cap/Div",
    ),
    "epsilon of the norm of the source's keys 1e-4 for 1e-5": Mutation(
        constant(1e-5, 1e-4, f"{d0}/cross_attention/key_norm"), model="normed heads", files="decoder_model",
        tap=f"{D0}.cross_attention", culprit="RMS norm of each head's keys",
    ),
    "epsilon of the norm of all queries 1e-4 for 1e-5": Mutation(
        constant(1e-5, 1e-4, f"{e0}/self_attention/query_norm"), model="scaled",
        tap=f"{E0}.self_attention", culprit="RMS norm of all queries",
    ),
    "a weight of the queries' norm": Mutation(
        weight(f"{E1}.self_attention.query_norm.weight", lambda x: x * 1.001), model="normed heads",
        weights=f"{E1}.self_attention.query_norm.weight", tap=f"{E1}.self_attention",
        culprit="RMS norm of each head's queries",
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
    # SSRU
    "what is kept and what is new exchanged": Mutation(
        after("Add", f"{d0}/self_attention/forget_proj", "Neg"), model="ssru", files=PAST,
        tap=f"{D0}.self_attention", path="cached, tapped", culprit="states: ",
    ),
    "no ReLU of the states": Mutation(
        node("Relu", f"{d1}/self_attention", become("Identity")), model="ssru", files="decoder_model",
        tap=f"{D1}.self_attention", culprit="ReLU of the states",
    ),
    "the state kept after the ReLU": Mutation(
        after("Gather", f"{d0}/self_attention/Gather", "Relu", at=1), model="ssru", files=PAST,
        tap=f"{D0}.self_attention", path="cached, tapped", culprit="the state that is kept", search="beam 4",
    ),
    "another layer's state": Mutation(
        reads(d1, "past_key_values.1.decoder.state", "past_key_values.0.decoder.state"), model="ssru", files=PAST,
        tap=f"{D1}.self_attention", path="cached, tapped", culprit="states: ",
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
    # Texts side by side
    "a window of five keys, not four": Mutation(
        node("GroupQueryAttention", f"{d1}/self_attention", attribute(local_window_size=5)), model="side by side",
        tap=f"{D1}.feed_forward", attribute=f"step_cpu: {d1}/self_attention/GroupQueryAttention",
    ),
    "a bound of another size": Mutation(
        node("GroupQueryAttention", f"{d0}/self_attention", attribute(softcap=2.5)), model="side by side",
        tap=f"{D0}.feed_forward", attribute=f"step_cpu: {d0}/self_attention/GroupQueryAttention",
    ),
    "a layer that isn't turned": Mutation(
        node("GroupQueryAttention", f"{d0}/self_attention", attribute(do_rotary=0)), model="side by side",
        tap=f"{D0}.feed_forward",
    ),
    "frequencies of the other layers": Mutation(
        reads(f"{d1}/self_attention/GroupQueryAttention", "positions.1.cos", "positions.cos"), model="side by side",
        tap=f"{D1}.feed_forward",
    ),
    "a shorter text's logits from its neighbour's row": Mutation(
        node("Max", "Max", become("Min")), model="side by side", tap=f"{D1}.feed_forward",
    ),
}  # fmt: skip
