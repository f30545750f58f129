"""What only a trained model can show. Nothing of it is asserted but that it is computed rightly."""

from __future__ import annotations

from claims.row import RECORDED, Row

TESTS = "claims/test_trained.py::test_"
STACKS = ("encoder", "decoder", "cross-attention")
STATES = ("trained", "before training")
KINDS = ("months", "days of the week", "units", "digits")

ROWS = (
    Row(
        30,
        "Heads learn to look at different words.",
        "w_h = softmax(Q_h K_h^T / √d_k), every head of every layer",
        {f"bits of spread of each head, {stack}": RECORDED for stack in STACKS},
        "trained.heads",
        ("claims.trained.attention_maps",),
        (TESTS + "maps_are_those_of_the_layers",),
        "trained.head_grid",
        trained=True,
    ),
    Row(
        36,
        "Similar words get similar vectors.",
        "cos(a, b) = a · b / (|a| |b|)",
        dict.fromkeys(("words compared", "mean cosine, own kind", "mean cosine, other kinds"), RECORDED)
        | {f"nearest word is of its kind, {kind}, %": RECORDED for kind in KINDS},
        "trained.similar",
        ("claims.trained.similar",),
        (TESTS + "words_of_one_kind_are_found_near",),
        "trained.word_map",
        trained=True,
    ),
    Row(
        37,
        "Projected into queries and keys, positions still know their neighbours.",
        "PE W_Q W_K^T PE^T / √d_k",
        {f"offset where most rows peak, each head, {state}": RECORDED for state in STATES}
        | {f"rows that peak there or next to it, %, {state}": RECORDED for state in STATES},
        "trained.projected",
        ("claims.trained.position_scores",),
        (TESTS + "projected_positions_peak_where_a_projection_puts_them",),
        "trained.position_maps",
        trained=True,
    ),
    Row(
        42,
        "Layers learn different attention.",
        "½ Σ_j |w_a(i, j) - w_b(i, j)|, mean over the rows i",
        {
            f"mean distance of {what}, encoder, {state}": RECORDED
            for what in ("heads of a layer", "layers")
            for state in STATES
        },
        "trained.layers",
        ("claims.trained.layers",),
        (TESTS + "equal_maps_have_no_distance",),
        "trained.head_distances",
        trained=True,
    ),
)
