"""Log-probabilities of given outputs: those of the float64 reference, on both runtimes and by every target's graphs."""

import numpy as np
import pytest
from combined import combined
from random_models import write_model
from small_models import alone, encoder_decoder, random_weights

from export import OnnxTransformer
from export.validate.reference import Reference
from mlx_transformer import Transformer, load
from mlx_transformer.generation.likelihood import log_probabilities
from mlx_transformer.system.errors import UserError

ROWS = [[5, 6, 2], [7, 2], [*range(20, 30), 2], [40, 31, 12, 6, 2]]
TARGETS = [[9, 2], [8, 9, 10, 11, 12, 2], [2], [33, 1, 4]]  # not every one has an end


def truth(config, weights, dtype):
    reference = Reference(config, weights, dtype)
    found = []
    for source, target in zip(ROWS, TARGETS, strict=True):
        if config.architecture == "decoder":
            logits = reference([[*source, *target[:-1]]])[0, len(source) - 1 :]
        else:
            logits = reference([source], [[config.bos_id, *target[:-1]]])[0]
        logits = logits - logits.max(axis=-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        found.append(log_p[np.arange(len(target)), target])
    return found


def near(found, config, weights):
    """By the rule of `validate`: at most eight times the error that NumPy makes in float32."""
    exact, rounded = (np.concatenate(truth(config, weights, dtype)) for dtype in (np.float64, np.float32))
    assert [len(row) for row in found] == [len(row) for row in TARGETS]
    assert np.abs(np.concatenate(found) - exact).max() <= 8 * np.abs(rounded - exact).max()
    assert np.ptp(exact) > 1  # else any would do


@pytest.mark.parametrize(("name", "target"), combined(["paper", "modern"], ["portable", "cpu"]))
def test_both_runtimes_find_the_reference_s(name, target, tmp_path):
    config = encoder_decoder(name)
    checkpoint, folder = write_model(config, tmp_path, target=target)
    model, _ = load(checkpoint)
    weights = model.weights()
    near(model.log_probabilities(ROWS, TARGETS), config, weights)
    onnx, shares = OnnxTransformer(folder, threads=1), []
    near(onnx.log_probabilities(ROWS, TARGETS, done=shares.append), config, weights)
    assert shares[-1] == 1


def test_a_decoder_alone():
    config = alone("paper", "decoder")
    weights = random_weights(config)
    near(Transformer.from_weights(config, weights).log_probabilities(ROWS, TARGETS), config, weights)


def test_the_sum_is_the_score_of_a_search(tmp_path):
    config = encoder_decoder("paper")
    _, folder = write_model(config, tmp_path)
    onnx = OnnxTransformer(folder, threads=1)
    for source, (best,) in zip(ROWS, onnx.search(ROWS, length_penalty=0, max_new_tokens=6), strict=True):
        ended = [*best.ids, 2] if len(best.ids) < 6 else best.ids
        (log_p,) = onnx.log_probabilities([source], [ended])
        assert len(ended) == len(log_p)
        np.testing.assert_allclose(log_p.sum(), best.score, rtol=1e-4, atol=0.05)  # a search bans two tokens


def test_refusals(tmp_path):
    config = encoder_decoder("paper")
    _, folder = write_model(config, tmp_path)
    graphs = OnnxTransformer(folder, threads=1).graphs
    for ids, targets, said in (
        ([[5, 2]], [], "1 inputs but 0 targets"),
        ([[5, 2]], [[]], "target row 0 is empty"),
        ([[5, 2]], [[999]], "target row 0, position 0: id 999"),
        ([[5, 2]], [[5] * (config.max_positions + 1)], "row 0: .* the model takes at most"),
    ):
        with pytest.raises(UserError, match=said):
            log_probabilities(graphs, ids, targets)
