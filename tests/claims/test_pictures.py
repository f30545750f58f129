"""Pictures in place of words: the same in ONNX Runtime as in MLX, on the CPU as the claims are."""

import mlx.core as mx
import numpy as np
import pytest
from claims import pictures

from export import OnnxTransformer, export_onnx
from export.validate.reference import Reference
from export.validate.rule import Deviation, Measurement, Truth, budget_for
from mlx_transformer.core.checkpoint import save_checkpoint


@pytest.mark.slow
def test_both_runtimes_put_pictures_in_the_same_words(on_cpu, tmp_path) -> None:
    """And what their encoders make of the patches is within the budget of `validate`."""
    seen = pictures.in_words()
    model, vectors = seen.reader.model, np.array(seen.reader.vectors(seen.pictures))
    save_checkpoint(tmp_path / "model", model.config, model.weights())
    exported = OnnxTransformer(export_onnx(tmp_path / "model", tmp_path / "onnx", inputs_embeds=True), threads=1)
    assert exported.generate(inputs_embeds=list(vectors), max_new_tokens=4) == seen.trained
    t64, t32 = (Reference(model.config, model.weights(), dtype).encode(vectors) for dtype in ("f8", "f4"))
    truth = Truth.of(t64, t32, np.ones(t64.shape[:2], bool), exact=False)
    for memory in (np.array(model.encode(inputs_embeds=vectors)), exported.encode(inputs_embeds=vectors)):
        judged = Measurement.of(Deviation.of(memory, truth), truth.scale, truth.scale, budget_for("float32", "cpu"))
        assert judged.passed, judged


def test_a_patch_is_a_square_of_the_picture() -> None:
    drawn, words = pictures.pictures(3, seed=1)
    assert np.array_equal(pictures.patches_of(drawn)[1, 6], drawn[1, 4:8, 8:12].ravel())
    left = [pictures.WORDS[row[2]] == "left" for row in words]
    assert [bool(picture[:, :8].sum() > picture[:, 8:].sum()) for picture in drawn] == left


def test_the_linear_map_is_trained_with_the_rest(on_cpu) -> None:
    mx.random.seed(1)
    reader = pictures.PictureReader()
    before = np.array(reader.projection.weight)
    pictures.train(reader, steps=1)
    assert (np.abs(np.array(reader.projection.weight) - before) > 0).mean() > 0.9
