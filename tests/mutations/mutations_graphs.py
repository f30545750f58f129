"""Bugs in graphs that no tensor shows: nodes that no input reaches, numbers that matter on other inputs, and the rules
and defaults of the search in one file. The comparison with the graphs that export builds has to name them."""

from typing import Any

import numpy as np
from mutation_edits import (
    after,
    become,
    constant,
    inside,
    node,
    number,
    output_of,
)
from mutations import D0, D1, E0, E1, Mutation

e0, e1, d0, d1 = (name.replace(".", "/", 1) for name in (E0, E1, D0, D1))
PAST = "decoder_with_past*"


def bounds(most: float, least: float | None = None) -> tuple[Any, Any]:
    return np.array(-most if least is None else least, np.float32), np.array(most, np.float32)


def one(value: float) -> Any:
    return np.array(value, np.float32)


GRAPHS = {
    # Nodes that no operation of the architecture has
    "a clip that no activation reaches": Mutation(
        after("Add", f"{e0}/feed_forward/up_proj", "Clip", *bounds(1e4)), files="encoder*",
        attribute="encoder_model: Clip that makes v_encoder.layers.0.feed_forward.up_proj.Add",
    ),
    "scores kept within float16 in the cached decoder": Mutation(
        after("MatMul", f"{d1}/cross_attention/MatMul", "Clip", *bounds(65504.0)), files=PAST,
        attribute="decoder_with_past_model: Clip that makes v_decoder.layers.1.cross_attention.MatMul",
    ),
    "logits cut at a thousand in the merged graph": Mutation(
        after("MatMul", "target_embedding/MatMul", "Clip", *bounds(1e3)), files="*merged*",
        attribute="decoder_model_merged: Clip that makes logits",
    ),
    "a product with one": Mutation(
        after("LayerNormalization", f"{e1}/feed_forward_norm", "Mul", one(1.0)), files="encoder*",
        attribute="encoder_model: Mul that makes encoder.layers.1",
    ),
    "a dropout that drops nothing yet": Mutation(
        after("Softmax", f"{d0}/self_attention", "Dropout"), files="decoder_model",
        attribute="decoder_model: Dropout that makes v_decoder.layers.0.self_attention.Softmax",
    ),
    "a ReLU of probabilities": Mutation(
        after("Softmax", f"{e1}/self_attention", "Relu"), files="encoder*",
        attribute="encoder_model: Relu that makes v_encoder.layers.1.self_attention.Softmax",
    ),
    "the largest of the logits and a number below all": Mutation(
        after("MatMul", "target_embedding/MatMul", "Max", one(-1e9)), files=PAST,
        attribute="decoder_with_past_model: Max that makes logits",
    ),
    "an identity in a decoder alone": Mutation(
        after("Relu", f"{d1}/feed_forward", "Identity"), model="decoder",
        attribute="model: Identity that makes v_decoder.layers.1.feed_forward.Relu",
    ),
    "a clip of the gated product of a T5": Mutation(
        after("Mul", f"{d1}/feed_forward/Mul", "Clip", *bounds(1e4)), model="scaled", files=PAST,
        attribute="decoder_with_past_model: Clip that makes v_decoder.layers.1.feed_forward.Mul",
    ),
    "a clip of the source's rows in a model of languages": Mutation(
        after("Gather", "embedding/Gather", "Clip", *bounds(1e3)), model="languages", files="encoder*",
        attribute="encoder_model: Clip that makes v_embedding.Gather",
    ),
    "a clip of the gates of a student, where it chooses among a shortlist": Mutation(
        after("Sigmoid", "", "Clip", *bounds(1.0, 0.0)), model="student", files="*listed*",
        attribute="decoder_listed_cpu: Clip that makes ",
    ),
    "a clip of the gates of a student": Mutation(
        after("Sigmoid", "", "Min", one(1.0)), model="student", files="decoder_cpu",
        attribute="decoder_cpu: Min that makes ",
    ),
    "integers of a product with fixed scales through an identity": Mutation(
        after("MatMulInteger", "", "Identity"), model="fixed scales", files="encoder*",
        attribute="encoder_model: Identity that makes ",
    ),
    # Numbers that matter on other inputs
    "a text's vector divided by 1e-4 at least": Mutation(
        constant(1e-12, 1e-4, "sentence_embedding/Clip"), model="text's vector",
        attribute="model: sentence_embedding/Clip",
    ),
    "a text without tokens divided by a half": Mutation(
        constant(1.0, 0.5, "sentence_embedding/Max"), model="text's vector",
        attribute="model: sentence_embedding/Max",
    ),
    "a text's vector of at most ten": Mutation(
        after("Div", "sentence_embedding/Div", "Clip", *bounds(10.0), at=1), model="text's vector",
        attribute="model: Clip that makes sentence_embedding",
    ),
    # One file
    "a limit of 51 tokens more than the source": Mutation(
        number(50, 51), model="one file", attribute="search: Add_", search="greedy, without a limit",
    ),
    "scores of all hypotheses": Mutation(
        output_of("scores", "Slice", become("Identity"), inputs=1), model="one file",
        attribute="search: Slice_", search="beam 4, 2 best, ids at the borders",
    ),
    "forced and banned tokens of id 0 ignored": Mutation(
        inside("GreaterOrEqual", "", become("Greater"), every=True), model="one file",
        attribute="search: phases/steps/GreaterOrEqual", search="greedy, ids at the borders",
    ),
    "repetitions looked for in the newest tokens alone": Mutation(
        inside("Greater", "", become("GreaterOrEqual")), model="one file", attribute="search: phases/steps/",
    ),
    "a clip inside the loop": Mutation(
        inside("LayerNormalization", "", lambda n: None, "Clip", *bounds(1e4)), model="one file",
        attribute="search: Clip that makes ",
    ),
    "a beam of two unless told otherwise": Mutation(
        number(1, 2, name="beam"), model="one file", attribute="search: default of beam"
    ),
    "an epsilon of the loop's norm": Mutation(
        inside("LayerNormalization", "", lambda n: setattr(n.attribute[0], "f", 1.01e-5)), model="one file",
        attribute="search: phases/steps/",
    ),
    "a norm's axis said otherwise": Mutation(
        node("Softmax", f"{e0}/self_attention", lambda n: setattr(n.attribute[0], "i", 3)), files="encoder*",
        attribute=f"encoder_model: {e0}/self_attention/Softmax",
    ),
}  # fmt: skip
