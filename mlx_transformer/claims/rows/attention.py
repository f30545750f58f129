"""Attention, its heads and its masks."""

from __future__ import annotations

from mlx_transformer.claims.row import Row, above, below, equal

ATTENTION = "mlx_transformer.nn.attention.Attention"
FUSED = "mlx_transformer.nn.attention.attention"
WEIGHTS = "mlx_transformer.nn.attention.attention_weights"
TESTS = "claims/test_attention.py::test_"

ROWS = (
    Row(
        15,
        "Scaled dot-product attention: each word takes a mean of all values, weighted by query times key.",
        "Attention(Q, K, V) = softmax(Q K^T / √d_k) V",
        {
            "shape of the weights of (6, 512)": equal(6, 6),
            "sums of its rows": equal(*[1] * 6, within=1e-6),
            "largest error of the fused kernel beside float64": below(1e-5),
        },
        "attention.scaled_dot_product",
        (FUSED, WEIGHTS),
        (TESTS + "scaled_dot_product_attention",),
    ),
    Row(
        16,
        "The table of YOUR CAT IS A LOVELY CAT, Q = K = V = X. Without positions both CATs look at the same words.",
        "A = softmax(Q K^T / √d_k), 6 × 6; s_ij = s_ji, so log A_ij - log A_ji = z_j - z_i",
        {
            "shape of the input": equal(6, 512),
            "largest difference of the rows of both CATs, without positions": below(1e-6),
            "each CAT to each CAT, without positions": equal(*[0.5] * 4, within=1e-6),
            "each CAT to itself, with positions": equal(0.901, 0.954, within=5e-4),
            "where each word looks most, with positions": equal(*range(6)),
            "sums of the rows": equal(*[1] * 6, within=1e-6),
            "largest |log A_ij - log A_ji - (z_j - z_i)|, with positions": below(1e-5),
            "of a head with projections": above(1),
            "of the notes' table": equal(0.495, within=5e-4),
            "of it explained by rounding to three decimals, at most": equal(0.015, within=5e-4),
            "LOVELY, A, IS of the notes' table multiplied around, and the other way": equal(
                0.00642, 0.00175, within=5e-6
            ),
            "sums of the rows of the notes' table": equal(1, 1, 1.001, 1, 1, 1.001, within=1e-9),
            "share of random rows of six whose three decimals sum to 1.001": equal(0.22, within=0.01),
        },
        "attention.worked_table",
        ("mlx_transformer.claims.attention_table.attention_table", WEIGHTS),
        (
            TESTS + "worked_table_of_your_cat_is_a_lovely_cat",
            TESTS + "the_table_of_the_notes_is_of_no_symmetric_scores",
        ),
        "attention.worked_tables",
        slip="The notes say that their table is of Q = K = V = X. Its scores would be symmetric, but LOVELY, A, IS "
        "multiplied around give 0.00642, and 0.00175 the other way: it misses z_j - z_i by 0.495, of which rounding "
        "explains 0.015. That two of its rows sum to 1.001 is rounding alone, as in 0.22 of all rows; its CAT rows "
        "differ because positions are in it.",
    ),
    Row(
        17,
        "Attention itself has no parameters: those of a layer are its projections.",
        "x_i · x_i ≥ x_i · x_j for rows of one length",
        {"parameters beside the projections": equal(0), "where each of six rows looks most": equal(*range(6))},
        "attention.without_parameters",
        (FUSED,),
        (TESTS + "attention_itself_has_no_parameters",),
    ),
    Row(
        18,
        "Why √d_k: products of d_k terms have variance d_k, and a softmax of large numbers has no gradient.",
        "Var(q · k) = d_k; d softmax_i / d s_i = w_i (1 - w_i)",
        {
            "112 / sqrt(64), from the odds of two weights": equal(14, within=1e-5),
            "Var(q · k) / d_k, d_k = 4, 16, 64, 256, 1024": equal(*[1] * 5, within=0.2),
            "gradient of the scaled softmax, d_k = 1024 / 4": above(0.95),
            "of the unscaled": below(0.1),
        },
        "attention.root_of_width",
        (WEIGHTS,),
        (
            TESTS + "scores_are_divided_by_the_root_of_d_k",
            TESTS + "products_have_variance_d_k_and_kill_the_gradient_unscaled",
        ),
        "attention.saturation",
    ),
    Row(
        19,
        "Attention is blind to order: words in another order give the same outputs in that order.",
        "Attn(P x) = P Attn(x) for every permutation P",
        {
            "largest |Attn(P x) - P Attn(x)|": below(1e-6),
            "largest |Attn(P x) - Attn(x)|": above(0.1),
            "lion, kills, deer: change of a word's output, without positions": below(1e-5, 1e-5, 1e-5),
            "the same with positions": above(0.1, 0.1, 0.1),
        },
        "attention.order_blind",
        (ATTENTION,),
        (
            TESTS + "attention_alone_is_blind_to_order",
            TESTS + "lion_kills_deer_needs_positions",
        ),
        "tables.lion_kills_deer",
        slip="The notes say invariant: then Attn(P x) would be Attn(x). The word is equivariant: outputs move along.",
    ),
    Row(
        20,
        "h heads of width d/h cost as much as one of width d: they are columns of the same product.",
        "MultiHead(x) = Concat(head_1, ..., head_h) W^O, d_k = d_v = d/h",
        {
            "d_k and d_v of the paper's base model": equal(64, 64),
            "multiplications of 1, 8 and 16 heads / those of one": equal(1, 1, 1),
            "largest |split heads - a loop over heads|": below(1e-5),
        },
        "cost.many_heads",
        (ATTENTION, "mlx_transformer.nn.attention.split_heads"),
        (
            TESTS + "heads_split_one_projection",
            TESTS + "many_heads_cost_as_much_as_one",
        ),
    ),
    Row(
        21,
        "A mask is 0 where a word may look and minus infinity where not: the softmax makes an exact zero of it.",
        "softmax(Q K^T / √d_k + M), M = 0 or -∞",
        {
            "largest masked weight": equal(0),
            "largest |sum of a row - 1|": below(1e-6),
            "change of earlier outputs by a later token": equal(0),
        },
        "attention.masked",
        ("mlx_transformer.nn.masks.causal_mask", "mlx_transformer.nn.masks.padding_mask"),
        (
            TESTS + "a_masked_weight_is_exactly_zero",
            TESTS + "a_future_token_changes_no_earlier_output",
        ),
        "attention.mask_pictures",
    ),
    Row(
        32,
        "Attention is a dictionary look-up gone soft: with growing scores it returns the value of the one key.",
        "lim softmax(s · q K^T) V = v_j for q = k_j and s → ∞",
        {
            "error of the value that is asked for, scores times a million": equal(0),
            "times one": above(0.1),
        },
        "attention.look_up",
        (FUSED,),
        (TESTS + "a_dictionary_look_up_in_the_limit",),
    ),
    Row(
        44,
        "The other sentences: in another order the same weights come out, unless positions say otherwise.",
        "W(P x) = P W(x) P^T without positions",
        {
            "largest change of a weight between both orders, without positions": below(*[1e-6] * 4),
            "the same with positions": above(*[0.1] * 4),
        },
        "attention.other_orders",
        (ATTENTION + ".weights",),
        ("claims/test_beside.py::test_words_that_come_twice_are_matched",),
        "tables.other_orders",
    ),
)
