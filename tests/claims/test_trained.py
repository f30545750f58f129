"""What is looked at in trained models, on weights that are made so that the answer is known."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from claims import trained
from claims.table import ROWS, computed
from small_models import write_text_model

from mlx_transformer import Transformer
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError


@pytest.mark.parametrize("number", [number for number, row in ROWS.items() if row.trained])
def test_numbers_have_the_names_of_the_table(model: trained.Trained, number: int) -> None:
    assert computed(ROWS[number], model).keys() == ROWS[number].numbers.keys()


def test_maps_are_those_of_the_layers(model: trained.Trained) -> None:
    source, target = model.pairs[0]
    maps = trained.attention_maps(model.model, source, target)
    n, t = len(source), len(target)
    assert {name: found.shape for name, found in maps.items()} == {
        "encoder": (2, 2, n, n),
        "decoder": (2, 2, t, t),
        "cross": (2, 2, t, n),
    }
    for found in maps.values():
        np.testing.assert_allclose(found.sum(axis=-1), 1, rtol=1e-6)
    assert not np.triu(maps["decoder"], 1).any()
    seen: dict[str, mx.array] = {}
    model.model([source], [target], tap=seen.__setitem__)
    for i, x in enumerate((seen["encoder.embedding"], seen["encoder.layers.0"])):
        heads = model.model.encoder.layers[i].self_attention
        expected = np.array(heads.weights(x, heads.keys_values(x)[0]))[0]
        np.testing.assert_array_equal(maps["encoder"][i].astype(np.float32), expected)


def test_sentences_of_ones_own_are_looked_at(model: trained.Trained) -> None:
    own = trained.open_trained(model.folder, ["May 1", "in 3 days"])
    assert [model.tokenizer.decode(source) for source, _ in own.pairs] == ["May 1", "in 3 days"]
    other = trained.open_trained(model.folder, ["May 1"])
    assert trained.heads(own) != trained.heads(other) != trained.heads(model)
    for sentence in ("", " ", "7 " * model.model.config.max_positions):
        with pytest.raises(UserError, match=r"^--sentence .* tokens, where 2 to \d+ go$"):
            trained.open_trained(model.folder, [sentence])


def test_words_of_one_kind_are_found_near(model: trained.Trained) -> None:
    words = trained.known_words(model)
    assert len(words) == sum(map(len, trained.KINDS.values()))
    random = trained.similar(model)
    weights = model.model.weights()
    rng = np.random.default_rng(0)
    centres = {kind: rng.normal(size=32) for kind in trained.KINDS}
    for kind, _, token in words:
        weights["embedding.weight"][token] = centres[kind] + 0.1 * rng.normal(size=32)
    made = trained.Trained(model.folder, Transformer.from_weights(model.model.config, weights), model.tokenizer)
    found = trained.similar(made)
    for kind in trained.KINDS:
        assert found[f"nearest word is of its kind, {kind}, %"] == 100
    assert found["mean cosine, own kind"] > 0.9
    assert abs(random["mean cosine, own kind"] - random["mean cosine, other kinds"]) < 0.1
    flat = trained.flattened(made)
    assert flat.shape == (len(words), 2)


def test_projected_positions_peak_where_a_projection_puts_them(model: trained.Trained) -> None:
    """W_Q = W_K: every position looks most at itself; W_Q turned by an offset: at that offset."""
    config = TransformerConfig.preset("tiny", 20, d_model=64, heads=1, d_ff=32)
    weights = Transformer(config).weights()
    name = "encoder.layers.0.self_attention.{}_proj.weight"
    from claims.positions import offset_rotation

    weights[name.format("key")] = np.eye(64, dtype=np.float32)
    for offset in (0, 3, -2):
        weights[name.format("query")] = offset_rotation(64, offset).astype(np.float32)
        (scores,) = trained.position_scores(Transformer.from_weights(config, weights))
        common, share = trained.peak(scores)
        assert common == offset
        assert share > 0.85  # rows whose neighbour is before the first position or past the last have no such peak
    learned = Transformer(TransformerConfig.preset("tiny", 20, d_model=64, positions="learned"))
    with pytest.raises(UserError, match="row 37 looks at sinusoids"):
        trained.position_scores(learned)


def test_equal_maps_have_no_distance(model: trained.Trained) -> None:
    weights = model.model.weights()
    for name in weights:
        if ".query_proj." in name:
            weights[name][:] = 0  # every word looks everywhere alike
    made = trained.Trained(model.folder, Transformer.from_weights(model.model.config, weights), model.tokenizer)
    found = trained.layers(made)
    assert found["mean distance of layers, encoder, trained"] < 1e-6
    assert found["mean distance of heads of a layer, encoder, trained"] < 1e-6
    assert found["mean distance of layers, encoder, before training"] > 0.01
    far = np.stack([np.stack([np.eye(4), np.eye(4)[::-1]])])
    assert list(trained._distances(far)) == [("heads of a layer", 1.0)]


def test_models_that_do_not_do(tmp_path: Path, model: trained.Trained) -> None:
    folder = write_text_model(tmp_path / "text") / "model"
    other = trained.open_trained(folder)
    with pytest.raises(UserError, match="too few of the words"):
        trained.similar(other)
    config = TransformerConfig.preset("tiny", 300, d_model=32, architecture="encoder", decoder_layers=0)
    save_checkpoint(tmp_path / "encoder", config, Transformer(config).weights(), model.tokenizer.to_json())
    with pytest.raises(UserError, match="these rows look at an encoder-decoder"):
        trained.open_trained(tmp_path / "encoder")


def test_digits_are_found_where_attention_puts_them(model: trained.Trained, monkeypatch) -> None:
    """Weights that look at a digit while it is written, and others that do so while it is read."""
    digits = model.tokenizer.encode(" 7 8")[:-1]
    source, target = [*digits, model.tokenizer.eos_id], [model.tokenizer.bos_id, *reversed(digits)]
    known = [i for i in digits if model.words([i])[0].isdigit()]
    assert len(known) == 2
    made = trained.Trained(model.folder, model.model, model.tokenizer)
    made.__dict__["pairs"] = [(source, target)]
    for shift, (written, read) in ((1, (100, 0)), (0, (0, 100))):
        weights = np.zeros((1, 2, len(target), len(source)))
        for i in known:
            weights[0, :, target.index(i) - shift, source.index(i)] = 1
        if shift:
            weights[0, :, -1, -1] = 1
        monkeypatch.setattr(trained, "attention_maps", lambda *_, weights=weights: {"cross": weights})
        found = trained.aligned(made)
        assert found["digits compared"] == 2
        assert found["looks most at the digit that is written, %, trained"] == written
        assert found["looks most at the digit that is read, %, trained"] == read
