"""Embeddings, sub-layers, norms, stacks, the classifier and decoding."""

from __future__ import annotations

from mlx_transformer.claims.row import Row, above, below, equal

TRANSFORMER = "mlx_transformer.nn.model.Transformer"
NORM = "mlx_transformer.nn.norms.LayerNorm"
TESTS = "claims/test_network.py::test_"

ROWS = (
    Row(
        1,
        "An embedding is a row of a table, which is what a one-hot vector times the table is.",
        "E_word = onehot(word) W",
        {"largest |one-hot @ W - lookup|": equal(0)},
        "network.one_hot",
        (f"{TRANSFORMER}.embed_source",),
        (TESTS + "an_embedding_is_a_one_hot_product",),
    ),
    Row(
        22,
        "Around each sub-layer: a residual connection, then a norm. Without the residual all positions become one.",
        "LayerNorm(x + Sublayer(x)); a stack tells positions apart by |X - mean(X)| / |X| of its output",
        {
            "largest |LayerNorm(x + Sublayer(x)) - output|, every layer of both stacks": equal(0),
            "largest |x + Sublayer(LayerNorm(x)) - output|, pre-norm": equal(0),
            "the first, if half of attention is added": above(0.1),
            "share of 4 layers' output that tells positions apart: both": above(0.3),
            "share of 4 layers' output that tells positions apart: the residual alone": above(0.3),
            "share of 4 layers' output that tells positions apart: the norm alone": below(1e-3),
            "share of 4 layers' output that tells positions apart: neither": below(1e-3),
            "gradient at the input, 24 layers / 2: both": equal(0.497, within=0.05),
            "gradient at the input, 24 layers / 2: the residual alone": above(1e6),
            "gradient at the input, 24 layers / 2: the norm alone": equal(0.108, within=0.02),
            "gradient at the input, 24 layers / 2: neither": below(1e-3),
        },
        "depth.residuals",
        ("mlx_transformer.nn.layers.EncoderLayer", "mlx_transformer.nn.layers.DecoderLayer"),
        (
            "claims/test_depth.py::test_each_sub_layer_is_norm_of_x_plus_sublayer_of_x",
            "claims/test_depth.py::test_positions_become_one_without_residuals_and_with_them_do_not",
            "claims/test_depth.py::test_gradients_of_all_four",
            "claims/test_depth.py::test_four_layers_need_the_residual_to_train",
        ),
        "network.residuals",
        slip="The notes say that residuals avoid vanishing gradients. With both, 24 layers leave 0.497 of what 2 do. "
        "But norms alone leave 0.108 and still make all positions one: the gradient by itself is no proof.",
    ),
    Row(
        23,
        "Layer norm: each position to mean 0 and variance 1 over its features, then a learned scale and shift.",
        "γ (x - μ) / √(σ^2 + ε) + β",
        {
            "LN(50.147, 3314.82, 8463.36, 8.021)": equal(-0.8433, 0.1031, 1.5957, -0.8555, within=5.1e-5),
            "LN(1242.22, 688.123, 434.944, 149.442)": equal(1.5253, 0.1478, -0.4817, -1.1914, within=5.1e-5),
            "LN(9.37, 4606.67, 944.705, 21189.4)": equal(-0.7813, -0.2435, -0.6719, 1.6967, within=5.1e-5),
        },
        "norms.worked",
        (NORM,),
        (TESTS + "layer_norm_numbers",),
    ),
    Row(
        24,
        "Layer norm looks at one position alone; batch norm mixes in the rest of the batch, and its padding.",
        "μ, σ over the features of one position, or over all positions of one feature",
        {
            "change of a sample's output by other batch mates, layer norm": equal(0),
            "batch norm": above(0.05),
            "by padding, layer norm": equal(0),
            "batch norm, by padding": above(0.05),
        },
        "norms.batch_mates",
        (NORM,),
        (TESTS + "layer_norm_ignores_batch_mates_and_batch_norm_does_not",),
        "network.normalised_together",
    ),
    Row(
        25,
        "The feed-forward net: wider, zero where negative, and back; on each position alone.",
        "FFN(x) = max(0, x W_1 + b_1) W_2 + b_2",
        {
            "parameters of the base model's, 512 to 2048 to 512": equal(2_099_712),
            "largest |FFN(x) - the formula in float64|": below(1e-5),
            "the same, an identity in place of max": above(0.5),
            "the same, b_1 left out": above(0.01),
            "the same, b_2 left out": above(0.01),
            "share of the inner units that max sets to 0": equal(0.5, within=0.02),
            "largest |FFN(P x) - P FFN(x)|": below(1e-6),
            "change of the other positions, one moved by 1": below(1e-6),
            "of itself": above(0.01),
        },
        "network.feed_forward",
        ("mlx_transformer.nn.feedforward.FeedForward",),
        (
            TESTS + "feed_forward_is_its_formula",
            TESTS + "feed_forward_commutes_with_permutations",
        ),
    ),
    Row(
        26,
        "N layers of encoder and decoder, the decoder looking at the encoder's output. They train; padding is nothing.",
        "logits = Decoder(target, Encoder(source))",
        {
            "change of a result by padding": below(2e-5),
            "loss of a 2+2 stack that copies five words of nine, first step": above(2.2),
            "after 150 steps": below(0.3),
        },
        "network.stacks",
        ("mlx_transformer.nn.layers.Encoder", "mlx_transformer.nn.layers.Decoder"),
        (
            TESTS + "padding_never_changes_a_result",
            TESTS + "a_two_plus_two_stack_trains",
        ),
    ),
    Row(
        27,
        "A linear map and a softmax give each word of the vocabulary a probability.",
        "p = softmax(h W^T)",
        {
            "sums of the probabilities of 24 words": equal(1, 1, 1, within=1e-6),
            "positions where the most probable word is not that of the largest logit": equal(0),
        },
        "network.classifier",
        (f"{TRANSFORMER}.logits",),
        (TESTS + "the_classifier_gives_word_probabilities",),
    ),
    Row(
        28,
        "Greedy decoding, a word a step from the start token to the end token, as the teacher-forced pass has it.",
        "y_t = argmax p(y | y_(<t), x)",
        {
            "largest |logit of a cached step - teacher-forced|": below(2e-5),
            "words that both choose differently, of 18": equal(0),
        },
        "network.greedy",
        (f"{TRANSFORMER}.step", "mlx_transformer.generation.greedy.Greedy"),
        (
            TESTS + "greedy_decoding_step_by_step",
            TESTS + "greedy_generation_runs_from_the_start_to_the_end_token",
        ),
    ),
    Row(
        35,
        "A word's vector depends on its sentence: bank has one embedding, and as many outputs as sentences.",
        "E_bank is one row; Encoder(x)_bank is not",
        {
            "largest change of the embedding of bank between two sentences": equal(0),
            "of the encoder's output": above(0.1),
        },
        "network.contextual",
        (f"{TRANSFORMER}.encode",),
        ("claims/test_beside.py::test_the_same_sentence_gives_the_same_vector",),
        "network.contextual",
    ),
    Row(
        40,
        "Layer norm is batch norm of the transposed matrix. Six differences follow, each with a number.",
        "LN(x) = BN(x^T)^T",
        {
            "largest |LN(x) - BN(x^T)^T|": below(1e-5),
            "layer norm, change between training and use": equal(0),
            "batch norm, the same": above(1),
            "largest output of a batch of one token, layer norm": above(1),
            "batch norm refuses a batch of one token": equal(1),
            "parameters, layer norm and batch norm": equal(32, 32),
            "largest |mean| after it": below(1e-6),
            "largest |variance - 1| after it": below(1e-4),
            "largest |x - LN(x)|, gamma and beta the width and centre of x": below(1e-5),
        },
        "norms.transposed",
        (NORM,),
        ("claims/test_beside.py::test_norms_agree_over_one_axis_alone",),
        "tables.six_headings",
    ),
    Row(
        41,
        "Nothing in attention is about words: patches of a picture go through the encoder as well.",
        "x_i = W patch_i + b",
        {
            "shape of the output, 16 patches": equal(16, 32),
            "largest |Encoder(P x) - P Encoder(x)|, without positions": below(1e-5),
            "outputs that change with one patch": equal(16),
            "share of unseen pictures put in the right words, untrained": below(0.1),
            "after 250 steps": above(0.7),
        },
        "pictures.patches",
        (f"{TRANSFORMER}.encode", "mlx_transformer.claims.pictures.PictureReader"),
        (
            "claims/test_pictures.py::test_both_runtimes_put_pictures_in_the_same_words",
            "mlx_transformer/nn/test_inputs_embeds.py::test_what_the_embedding_gives_is_encoded_as_its_ids_are",
            "export/targets/test_vectors.py::test_validate_proves_it_for_vectors_of_no_table",
        ),
        "pictures.in_words",
    ),
)
