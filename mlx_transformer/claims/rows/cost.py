"""What attention costs, and recurrent nets and convolutions beside it."""

from __future__ import annotations

from mlx_transformer.claims.row import RECORDED, Row, above, below, equal

LAYER = "mlx_transformer.nn.layers.EncoderLayer"

ROWS = (
    Row(
        29,
        "All positions are computed at once, with n weights for each of n positions.",
        "n^2 weights; n · d activations",
        {
            "slope of the bytes of the weights over n, between logarithms; of the activations": equal(
                2, 1, within=1e-9
            ),
            "bytes of the weights of a head, n = 64 and 1024": equal(16_384, 4_194_304),
            "measured slope of attention's time, the last doubling": RECORDED,
            "measured slope of the recurrent net's": RECORDED,
        },
        "cost.growth",
        ("mlx_transformer.nn.attention.attention_weights",),
        ("claims/test_beside.py::test_multiplications_grow_with_the_square_of_the_length",),
        "comparisons.growth",
    ),
    Row(
        31,
        "Sizes that are powers of two are said to run faster: 510 beside 512, measured on this machine.",
        "CPU time of (256, d) · (d, 4d) / d^2, d = 510 over d = 512",
        {"CPU time of a multiplication, width 510 / width 512": RECORDED},
        "cost.powers_of_two",
        ("mlx_transformer.claims.cost.powers_of_two",),
        ("claims/test_beside.py::test_a_slower_width_would_be_seen",),
    ),
    Row(
        33,
        "A recurrent net goes step by step and forgets: what reaches the first word falls geometrically.",
        "h_t = tanh(W x_t + U h_(t-1) + b)",
        {
            "gradient over 64 positions / over 4, recurrent": below(1e-12),
            "the same, attention": above(0.01),
            "what a step leaves of it, recurrent: 4 to 8, to 16, to 32, to 64": equal(*[0.44] * 4, within=0.03),
        },
        "recurrent.forgetting",
        ("mlx_transformer.claims.recurrent.recurrent", LAYER),
        ("claims/test_beside.py::test_a_net_that_forgets_nothing_would_be_seen",),
        "comparisons.forgetting",
    ),
    Row(
        34,
        "The longest way between two positions: one layer of self-attention, n recurrent steps, log n convolutions.",
        "1; n; log_2 n dilated; n - 1 of neighbours (table 1 of the paper: O(1), O(n), O(log_k n), O(n/k))",
        {
            "blocks of the Jacobian that are zero, one layer of self-attention, 16 positions": equal(0),
            "layers until the last output hears the first input: self-attention": equal(1),
            "recurrent, in steps": equal(16),
            "dilated convolutions of two": equal(4),
            "convolutions of two neighbours": equal(15),
        },
        "recurrent.path_lengths",
        (LAYER, "mlx_transformer.claims.recurrent.sensitivity"),
        ("claims/test_beside.py::test_blocks_of_the_jacobian_that_must_be_zero_are",),
        "comparisons.path_lengths",
    ),
)
