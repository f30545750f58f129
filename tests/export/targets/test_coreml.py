"""Target coreml: graphs of fixed shape, without operators on shapes, that compute what the others do."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import combined, thinned
from coreml_models import ARCHITECTURES, SHAPE, config_of
from small_models import CHOICES, random_weights

from export import OnnxTransformer, export_onnx
from export.targets.coreml.graphs import BUILDERS, OPERATORS
from export.targets.coreml.shape import FixedShape
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Sources
from mlx_transformer.system.errors import UserError


def export_coreml(config: TransformerConfig, folder: Path) -> Path:
    save_checkpoint(folder / "model", config, random_weights(config))
    return export_onnx(folder / "model", folder / "fixed", target="coreml", fixed_shape=SHAPE[config.architecture])


def pair(config: TransformerConfig, folder: Path) -> tuple[OnnxTransformer, OnnxTransformer]:
    """(of fixed shape, portable)"""
    fixed = export_coreml(config, folder)
    return OnnxTransformer(fixed), OnnxTransformer(export_onnx(folder / "model", folder / "portable"))


@pytest.mark.parametrize(("name", "architecture"), combined(CHOICES, ARCHITECTURES))
def test_nothing_is_dynamic(name, architecture, tmp_path):
    config = config_of(name, architecture)
    export_coreml(config, tmp_path)
    files = sorted((tmp_path / "fixed" / "onnx").glob("*.onnx"))
    assert {file.stem for file in files} == set(BUILDERS[architecture])
    for file in files:
        graph = onnx.load(file, load_external_data=False).graph
        assert {(node.domain, node.op_type) for node in graph.node} <= {("", name) for name in OPERATORS}
        for value in (*graph.input, *graph.output):
            assert all(axis.dim_value > 0 for axis in value.type.tensor_type.shape.dim), value.name
        known = {tensor.name for tensor in graph.initializer}
        for node in graph.node:  # what says a shape, axes or limits is a constant
            if node.op_type in ("Reshape", "Unsqueeze", "Clip", "Split"):
                assert set(node.input[1:]) <= known, node.name


@pytest.mark.parametrize("name", thinned(CHOICES, 4))
def test_searches_of_encoder_decoders(name, tmp_path):
    fixed, portable = pair(config_of(name, "encoder-decoder"), tmp_path)
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 50, n).tolist() for n in (12, 1, 5, 7)]
    for beam in (1, 4):
        options = dict(beam=beam, max_new_tokens=12, n_best=beam)
        results, expected = fixed.search(rows, **options), portable.search(rows, **options)
        for by_coreml, by_portable in zip(results, expected, strict=True):
            assert [h.ids for h in by_coreml] == [h.ids for h in by_portable]
            np.testing.assert_allclose([h.score for h in by_coreml], [h.score for h in by_portable], atol=1e-5)


@pytest.mark.parametrize("name", thinned(CHOICES, 2))
def test_continuations_of_decoders(name, tmp_path):
    fixed, portable = pair(config_of(name, "decoder"), tmp_path)
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 50, n).tolist() for n in (6, 1, 3, 4)]
    assert fixed.generate(rows, max_new_tokens=10) == portable.generate(rows, max_new_tokens=10)


@pytest.mark.parametrize("name", thinned([*CHOICES][::-1], 2))
def test_logits_of_encoders(name, tmp_path):
    """Padding on either side."""
    fixed, portable = pair(config_of(name, "encoder"), tmp_path)
    ids = np.random.default_rng(0).integers(3, 50, (4, 9))
    mask = np.ones_like(ids)
    mask[1, 5:], mask[2, :4] = 0, 0
    for method in ("logits", "encode"):
        logits, expected = (getattr(model, method)(ids, mask) for model in (fixed, portable))
        np.testing.assert_allclose(logits[mask == 1], expected[mask == 1], atol=1e-5)


def test_what_lies_in_a_buffer_behind_the_position_is_not_seen(tmp_path):
    """And a finite value there leaves no trace of itself."""
    fixed, _ = pair(config_of("paper", "encoder-decoder"), tmp_path)
    rows = Sources.of(fixed.config, ids=[[5, 6, 7]])
    (clean, first), (dirty, _) = fixed.graphs.start(rows), fixed.graphs.start(rows)
    for value in fixed.graphs.graph.cache:
        x = dirty.state[value].copy()
        x[:, :, 1:] = 1e3
        dirty.state[value] = x
    ids = first.argmax(-1)
    np.testing.assert_array_equal(clean.step(ids), dirty.step(ids))


def test_lengths(tmp_path):
    fixed, _ = pair(config_of("paper", "encoder-decoder"), tmp_path)
    assert fixed.config.max_positions == 12
    with pytest.raises(UserError, match="13 tokens, the model takes at most 12"):
        fixed.generate([[5] * 13])
    assert len(fixed.generate([[5] * 12])[0]) <= 12
    described = json.loads((tmp_path / "fixed" / "mlx_transformer.json").read_text(encoding="utf-8"))
    assert (described["target"], described["fixed_shape"]) == ("coreml", "3x12x16")


@pytest.mark.parametrize(
    ("target", "shape", "said"),
    [
        ("coreml", None, "needs a fixed shape: ROWSxSOURCExTARGET"),
        ("coreml", "1x64", "give ROWSxSOURCExTARGET"),
        ("coreml", "1x0x4", "give ROWSxSOURCExTARGET"),
        ("coreml", "9223372036854775808x8x8", "give ROWSxSOURCExTARGET"),
        ("coreml", "99999x8x8", "99999 rows, at most 1024"),
        ("coreml", "1x8x41", "has 40 positions, not 41"),
        ("portable", "1x8x8", "only coreml takes one"),
    ],
)
def test_refused(target, shape, said, tmp_path):
    config = config_of("paper", "encoder-decoder")
    save_checkpoint(tmp_path / "model", config, random_weights(config))
    with pytest.raises(UserError, match=said):
        export_onnx(tmp_path / "model", tmp_path / "onnx", target=target, fixed_shape=shape)


def test_float32_alone(tmp_path):
    config = config_of("paper", "encoder-decoder")
    save_checkpoint(tmp_path / "model", config, random_weights(config))
    with pytest.raises(UserError, match="takes float32 alone"):
        export_onnx(tmp_path / "model", tmp_path / "onnx", target="coreml", fixed_shape="1x8x8", precision="int8")
    assert not (tmp_path / "onnx").exists()


def test_positions_of_each_architecture():
    for architecture in ARCHITECTURES:
        shape = FixedShape.parse(SHAPE[architecture], config_of("paper", architecture))
        assert shape.positions == (16 if architecture == "decoder" else 12)
