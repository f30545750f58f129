"""Whoever is computed with it, a sentence's answer is the same: tokens, and scores bit for bit."""

import dataclasses

import numpy as np
import pytest
from combined import combined
from small_models import alone, encoder_decoder, random_weights

from export import OnnxTransformer, export_onnx
from export.search import SearchModel, export_search
from export.targets.portable.runtime import SOURCE_MULTIPLE
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.inputs import Sources

MODELS = {
    "paper": encoder_decoder("paper"),
    "modern": encoder_decoder("modern"),
    "odd widths": encoder_decoder("odd widths"),
    "relative": encoder_decoder("positions=relative"),
    "ssru": encoder_decoder("decoder_self_attention=ssru"),
    "decoder": alone("modern", "decoder"),
}
FORMS = ["portable", "cpu", "search portable", "search cpu"]


def rows(count, longest=19):
    """Sources of all lengths up to 20, the shortest no more than their eos."""
    rng = np.random.default_rng(1)
    return [[*rng.integers(3, 50, n).tolist(), 2] for n in rng.integers(0, longest + 1, count)]


def opened(name, form, folder, precision="int8"):
    """form: a target, or "search TARGET" for the single file."""
    checkpoint = save_checkpoint(folder / "model", MODELS[name], random_weights(MODELS[name], 3))
    target = form.split()[-1]
    if form.startswith("search"):
        return SearchModel(export_search(checkpoint, folder / "s.onnx", target=target, precision=precision), threads=1)
    return OnnxTransformer(export_onnx(checkpoint, folder / "onnx", target=target, precision=precision), threads=1)


def check(model, sources, **options):
    """Each by itself, all backwards, and shuffled in batches of another size."""

    def search(given, **further):
        found = model.search(given, max_new_tokens=8, **options, **further)
        return [[(best.ids, best.score) for best in hypotheses] for hypotheses in found]

    one_by_one = [search([row])[0] for row in sources]
    assert search(sources[::-1]) == one_by_one[::-1]
    order = np.random.default_rng(2).permutation(len(sources))
    shuffled = search([sources[i] for i in order], batch_tokens=150)
    assert shuffled == [one_by_one[i] for i in order]


@pytest.mark.fast("ssru-portable", "decoder-portable")
@pytest.mark.parametrize(
    ("name", "form"),
    [("decoder", "portable"), *combined([name for name in MODELS if name != "decoder"], FORMS, step=2)],
)
def test_int8(name, form, tmp_path):
    model = opened(name, form, tmp_path)
    check(model, rows(24))
    check(model, rows(12), beam=3, n_best=2)


@pytest.mark.parametrize("form", ["portable", "cpu"])
def test_int8_weights(form, tmp_path):
    check(opened("paper", form, tmp_path, "int8-weights"), rows(24))


def test_int8_web(tmp_path):
    check(opened("paper", "web", tmp_path), rows(24))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_thousand_lines(form, tmp_path):
    check(opened("paper", form, tmp_path), rows(1000, 30))


def test_a_row_of_zeros_is_no_division_by_zero(tmp_path):
    """Tokens whose embedding is nothing but zeros, where nothing is added to it."""
    config = encoder_decoder("untied")
    weights = random_weights(config, 3)
    for name in ("source_embedding.weight", "target_embedding.weight"):
        weights[name][5:9] = 0
    for name in weights:
        if name.endswith("norm.bias"):
            weights[name][:] = 0
    checkpoint = save_checkpoint(tmp_path / "model", config, weights)
    plain = OnnxTransformer(export_onnx(checkpoint, tmp_path / "float32"), threads=1)
    [[expected]] = plain.search([[5, 6, 7, 2]], max_new_tokens=4)
    for target in ("portable", "cpu"):
        folder = export_onnx(checkpoint, tmp_path / target, target=target, precision="int8")
        [[best]] = OnnxTransformer(folder, threads=1).search([[5, 6, 7, 2]], max_new_tokens=4)
        assert best.score == pytest.approx(expected.score, rel=0.1)


@pytest.mark.parametrize(("lengths", "padded_to"), [([1], 4), ([4, 3], 4), ([5, 2], 8), ([37, 3], 39), ([39], 39)])
def test_no_source_is_padded_beyond_what_the_model_takes(lengths, padded_to):
    """Relative positions have a table of distances, with no row beyond them."""
    config = dataclasses.replace(MODELS["relative"], max_positions=39)
    given = [np.arange(3, 3 + n) for n in lengths]
    source, mask = Sources.of(config, ids=given).padded(SOURCE_MULTIPLE, config.max_positions)
    ids = source["source_ids"]
    assert ids.shape == mask.shape == (len(lengths), padded_to)
    for row, tokens, seen in zip(given, ids, mask, strict=True):
        assert tokens[: len(row)].tolist() == row.tolist()
        assert seen.tolist() == [1] * len(row) + [0] * (padded_to - len(row))
        assert (tokens[len(row) :] == config.pad_id).all()


@pytest.mark.slow
def test_the_longest_source_of_relative_positions(tmp_path):
    config = dataclasses.replace(MODELS["relative"], max_positions=39)
    checkpoint = save_checkpoint(tmp_path / "model", config, random_weights(config, 3))
    sources = [[*[5] * 38, 2], [7, 2], [*[6] * 36, 2]]
    for target in ("portable", "cpu"):
        folder = export_onnx(checkpoint, tmp_path / target, target=target, precision="int8")
        check(OnnxTransformer(folder, threads=1), sources)
