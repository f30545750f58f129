"""Checkpoints quantised by MLX: read bit for bit as MLX reads them, described as mlx-lm does, run; damage is named."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from quantized_models import NAMES, SCHEMES, SHORT, SMALL_GROUP, assert_values_of_mlx, quantized_models, wide
from safetensors.numpy import save_file
from small_models import configs, random_weights

from export import export_onnx
from export.precision.packed import PARTS, planes
from mlx_transformer import Transformer
from mlx_transformer.cli import main
from mlx_transformer.convert.quantize import quantize, quantize_checkpoint
from mlx_transformer.core.checkpoint import WEIGHTS, open_checkpoint, save_checkpoint
from mlx_transformer.core.parameters import output_weight_name, parameter_shapes, quantizable_shapes
from mlx_transformer.core.quantization import SHORT_FLOATS, Packed, Scheme, from_config, stored_shapes, to_config
from mlx_transformer.nn.parameters import dense_weights
from mlx_transformer.nn.quantize import quantization_of
from mlx_transformer.system.errors import UserError

pytestmark = pytest.mark.gpu_path

model = pytest.fixture(scope="module")(quantized_models)
GOLDEN = Path(__file__).parents[1] / "families" / "golden_mlx_lm"


def rows(seed: int, count: int, width: int) -> np.ndarray:
    """Ordinary rows, and those that quantisers stumble over: constant, zero, of one sign, with an outlier, tiny."""
    w = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    odd = [np.full(width, 0.25), np.zeros(width), np.abs(w[0]) + 3, -np.abs(w[0]) - 3, w[0] * 1e-30]
    outlier = w[0].copy()
    outlier[5] = 1e4
    return np.concatenate([w, np.stack([*odd, outlier]).astype(np.float32)])


@pytest.mark.parametrize("scheme", SCHEMES, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_those_of_mlx(scheme, dtype):
    w = mx.array(np.clip(rows(scheme.bits, 3, 3 * 128), -6e4, 6e4)).astype(getattr(mx, dtype))
    stored = mx.quantize(w, scheme.group_size, scheme.bits)
    expected = mx.dequantize(*stored, scheme.group_size, scheme.bits).astype(mx.float32)
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    words, *numbers = (np.array(array.astype(mx.float32) if i else array) for i, array in enumerate(stored))
    packed = Packed(words, *(array.astype(numpy_dtype) for array in numbers), scheme)
    assert packed.dequantised().dtype == numpy_dtype
    assert_values_of_mlx(np.array(expected), packed)


@given(st.sampled_from(SCHEMES), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_any_words_unpack_to_the_integers_of_mlx(scheme, count, groups, seed):
    width = groups * scheme.group_size
    words = np.random.default_rng(seed).integers(0, 2**32, (count, width * scheme.bits // 32), np.uint32)
    ones, zeros = np.ones((count, groups), np.float32), np.zeros((count, groups), np.float32)
    packed = Packed(words, ones, zeros, scheme)
    expected = mx.dequantize(mx.array(words), mx.array(ones), mx.array(zeros), scheme.group_size, scheme.bits)
    np.testing.assert_array_equal(packed.integers(), np.array(expected))
    parts = planes(packed.integers(), PARTS[scheme.bits])
    assert sum(part.nbytes for part in parts) == words.nbytes  # nothing is stored in more bits than it has


def test_config_says_what_mlx_lm_says():
    shapes, matrices = parameter_shapes(wide()), quantizable_shapes(wide())
    usual = {name: Scheme(32, 4) for name in matrices}
    assert to_config(usual) == {"group_size": 32, "bits": 4, "mode": "affine"}
    mixed = {**usual, "embedding.weight": Scheme(64, 8)}
    entry = to_config(mixed)
    assert entry["embedding"] == {"group_size": 64, "bits": 8}
    assert from_config(json.loads(json.dumps(entry)), stored_shapes(shapes, mixed), matrices) == mixed
    unless = {**entry, "embedding": False}
    plain = {name: scheme for name, scheme in usual.items() if name != "embedding.weight"}
    assert from_config(unless, stored_shapes(shapes, plain), matrices) == plain


def test_shapes_decide_where_the_config_names_no_layer():
    """As in mlx-lm: a default that doesn't fit a layer's tensors isn't applied to it."""
    shapes, matrices = parameter_shapes(wide()), quantizable_shapes(wide())
    each = itertools.cycle(
        [Scheme(32, 3), Scheme(32, 4, "mxfp4"), Scheme(16, 4, "nvfp4"), Scheme(16, 6), Scheme(32, 8)]
    )
    mixed = {name: next(each) for name in matrices}
    assert from_config({"group_size": 64, "bits": 4}, stored_shapes(shapes, mixed), matrices) == mixed
    assert from_config(json.loads(json.dumps(to_config(mixed))), stored_shapes(shapes, mixed), matrices) == mixed


@pytest.mark.parametrize(("mode", "sizes"), SHORT_FLOATS.items())
def test_short_floats_of_every_code(mode, sizes):
    group_size, bits = sizes
    codes = np.arange(127 if mode == "nvfp4" else 245, dtype=np.uint8)  # from 245 on mxfp8 overflows
    words = np.random.default_rng(3).integers(0, 2**32, (len(codes), 8 * group_size * bits // 32), np.uint32)
    if mode == "mxfp8":
        octets = words.view(np.uint8)
        octets[octets % 128 == 127] = 5
    scales = np.repeat(codes[:, None], 8, axis=1)
    expected = mx.dequantize(mx.array(words), mx.array(scales), None, group_size, bits, mode, dtype=mx.float32)
    got = Packed(words, scales, None, Scheme(group_size, bits, mode)).dequantised()
    np.testing.assert_array_equal(got, np.array(expected))
    packed = Packed(words, scales, None, Scheme(group_size, bits, mode))
    assert packed.is_finite
    assert not dataclasses.replace(packed, scales=np.where(scales == 9, np.uint8(255), scales)).is_finite


@pytest.mark.fast("mxfp4", "scheme3")
@pytest.mark.parametrize("scheme", [*SHORT, SMALL_GROUP])
def test_short_floats_and_small_groups_run(scheme, model):
    """In MLX's kernels, or as float32 where MLX has none; the embedding, the tied classifier and a step of a cache."""
    folder = model(scheme)
    opened, loaded = open_checkpoint(folder), Transformer.load(folder)
    assert set(opened.quantization.values()) == {scheme}
    assert quantization_of(loaded) == (opened.quantization if scheme.runs_in_mlx else {})
    plain = Transformer.from_weights(opened.config, dict(opened.tensors()))
    source, target = np.array([[5, 6, 7, 2]]), np.array([[1, 8, 9]])
    got, expected = (np.array(each(source, target)) for each in (loaded, plain))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())
    assert loaded.generate([[5, 6, 7, 2]], max_new_tokens=6) == plain.generate([[5, 6, 7, 2]], max_new_tokens=6)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([4], "expected an object"),
        ({"group_size": 64}, "bits missing"),
        ({"group_size": 64, "bits": 7}, "bits=7"),
        ({"group_size": 8, "bits": 4}, "group_size=8"),
        ({"group_size": 64, "bits": True}, "bits=True"),
        ({"group_size": 32, "bits": 4, "mode": "awq"}, "a mode of affine, mxfp4"),
        ({"group_size": 64, "bits": 4, "mode": "mxfp4"}, "group_size=64: choose one of 32"),
        ({"group_size": 32, "bits": 4, "embeding": {"group_size": 32, "bits": 8}}, "unknown layer 'embeding'"),
        ({"group_size": 32, "bits": 4, "embedding": False}, "said not to be quantised"),
        ({"group_size": 32, "bits": 4, "embedding": [8]}, "expected group_size"),
        (
            {"group_size": 32, "bits": 4, "encoder.layers.0.feed_forward.down_proj": {"group_size": 64, "bits": 4}},
            "no groups of 64",
        ),
    ],
)
def test_nonsense_in_the_config_is_refused(values, said):
    shapes, matrices = parameter_shapes(wide()), quantizable_shapes(wide())
    stored = stored_shapes(shapes, {name: Scheme(32, 4) for name in matrices})
    with pytest.raises(UserError, match=said):
        from_config(values, stored, matrices)
    with pytest.raises(UserError, match="no matrix has scales"):
        from_config({"group_size": 32, "bits": 4}, shapes, matrices)


@pytest.mark.fast("untied, decoder", "modern, encoder", "odd widths")
@pytest.mark.parametrize("name", ["paper", "odd widths", "two vocabularies", "untied, decoder", "modern, encoder"])
def test_saved_loaded_and_run(name, tmp_path):
    config = configs()[name]
    save_checkpoint(tmp_path / "plain", config, random_weights(config))
    quantize_checkpoint(tmp_path / "plain", tmp_path / "q", Scheme(32, 6))
    opened = open_checkpoint(tmp_path / "q")
    divided = {n for n, shape in quantizable_shapes(config).items() if shape[1] % 32 == 0}
    assert opened.quantization.keys() == divided
    loaded = Transformer.load(tmp_path / "q")
    assert quantization_of(loaded) == opened.quantization
    values = dict(opened.tensors())
    for n, array in dense_weights(loaded).items():
        np.testing.assert_array_equal(array, values[n], err_msg=n)
    save_checkpoint(tmp_path / "again", config, loaded.weights(), quantization=quantization_of(loaded))
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "q" / WEIGHTS).read_bytes()
    if config.has_decoder:
        plain = Transformer.from_weights(config, values)
        ids = [[5, 6, 7, 2], [8, 2]]
        assert loaded.generate(ids, max_new_tokens=8) == plain.generate(ids, max_new_tokens=8)
        name = output_weight_name(config)
        np.testing.assert_array_equal(np.array(plain.classifier().weights[0]), values[name])
        if name in divided:
            assert_values_of_mlx(np.array(loaded.classifier().weights[0]), opened.packed(name))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_lower_precision_stays(dtype, tmp_path):
    """A file as MLX writes it after `model.set_dtype(bfloat16)`: run in its own type, or widened exactly to float32."""
    model = Transformer(wide())
    quantize(model, Scheme(32, 4))
    quantization = quantization_of(model)
    save_checkpoint(tmp_path / "q", model.config, model.weights(), quantization=quantization)
    (tmp_path / "q" / "manifest.json").unlink()
    model.set_dtype(getattr(mx, dtype))
    mx.save_safetensors(str(tmp_path / "q" / WEIGHTS), dict(tree_flatten(model.parameters())))
    kept, own = Transformer.load(tmp_path / "q"), model.weights()
    assert kept.precision == dtype
    assert_same_bits(kept.weights(), own)
    for folder in (tmp_path / "q", kept.save(tmp_path / "again")):
        assert_same_bits(dict(open_checkpoint(folder).stored()), own)
    model.set_dtype(mx.float32)
    assert_same_bits(Transformer.load(tmp_path / "q", precision="float32").weights(), model.weights())
    assert_same_bits(dict(open_checkpoint(tmp_path / "q").widened().tensors()), dense_weights(model))


def assert_same_bits(got, expected):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert (got[name].dtype, got[name].tobytes()) == (array.dtype, array.tobytes()), name


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_command_line(model, tmp_path, capsys):
    plain, quantised = model(Scheme(32, 4)).parent / "plain", model(Scheme(64, 4))
    command = f"mlx-transformer quantize {quantised} FLOATS --dequantize"
    main(["quantize", str(plain), str(tmp_path / "q"), "--bits", "3"])
    output = capsys.readouterr().out
    assert "3 bits in groups of 64" in output
    assert "not quantised: encoder.layers.0.feed_forward.down_proj.weight" in output  # width 96
    main(["info", str(tmp_path / "q")])
    assert "3 bits in groups of 64" in capsys.readouterr().out
    main(["quantize", str(plain), str(tmp_path / "short"), "--mode", "mxfp4"])
    assert "4 bits (mxfp4) in groups of 32" in capsys.readouterr().out
    assert "--bits 8: choose one of 4" in refused(capsys, "quantize", plain, tmp_path / "x", "--mode=mxfp4", "--bits=8")
    told = refused(capsys, "quantize", quantised, tmp_path / "x")
    assert told.endswith(f"is quantised already; quantise the original, or make floats of it: {command}\n")
    main(shlex.split(command.replace("FLOATS", str(tmp_path / "floats")))[1:])
    assert_same_bits(*(dict(open_checkpoint(folder).tensors()) for folder in (tmp_path / "floats", quantised)))
    assert not open_checkpoint(tmp_path / "floats").quantization
    assert "isn't quantised" in refused(capsys, "quantize", plain, tmp_path / "x", "--dequantize")
    assert "takes only --force" in refused(capsys, "quantize", quantised, tmp_path / "x", "--dequantize", "--bits=8")
    main(["quantize", str(GOLDEN / "llama-4"), str(tmp_path / "ours"), "--dequantize"])
    main(["to-huggingface", str(tmp_path / "ours"), str(tmp_path / "theirs")])
    for name in ("ours", "theirs"):
        main(["quantize", str(tmp_path / name), str(tmp_path / f"{name}-8"), "--bits=8", "--group-size=32"])
    ours, theirs = (tmp_path / f"{name}-8" / WEIGHTS for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    capsys.readouterr()
    main(["import", str(GOLDEN / "llama-4"), str(tmp_path / "integers")])
    main(["to-gguf", str(tmp_path / "integers"), str(tmp_path / "x.gguf"), "--type", "q8_0"])
    main(["to-huggingface", str(tmp_path / "integers"), str(tmp_path / "wide")])
    said = capsys.readouterr().out
    assert "quantised matrices became q8_0, rounded again" in said
    assert "quantised matrices became floats: --mlx-lm keeps them" in said
    assert "a mean of 7 bits: needs text" in refused(capsys, "quantize", plain, tmp_path / "x", "--bits", 7)
    assert "--group-size 16" in refused(capsys, "quantize", plain, tmp_path / "x", "--group-size", 16)
    assert "is the folder that is read" in refused(capsys, "quantize", plain, plain)
    assert "no such folder" in refused(capsys, "quantize", tmp_path / "none", tmp_path / "x")
    assert "isn't quantised" in refused(capsys, "export", plain, tmp_path / "x", "--precision", "packed")
    assert not (tmp_path / "x").exists()


def test_progress_is_told_on_standard_error(model, tmp_path, capsys, at_pace):
    plain, told = model(Scheme(32, 4)).parent / "plain", []
    quantize_checkpoint(plain, tmp_path / "q", Scheme(64, 4), watch=lambda *said: told.append(said))
    shares, what = zip(*told, strict=True)
    assert (list(shares), shares[0], shares[-1]) == (sorted(shares), 0, 1)
    assert (what[0], what[-1], len(told)) == (
        "reading",
        "written",
        len(open_checkpoint(tmp_path / "q").quantization) + 3,
    )
    at_pace(11)
    main(["quantize", str(plain), str(tmp_path / "again")])
    out, said = capsys.readouterr()
    assert out.count("\n") == 1
    assert said.startswith("quantize   0 %  reading\nquantize  10 %  ")
    assert "quantize 100 %  written" in said


def test_nothing_to_quantise(tmp_path):
    config = wide(d_model=16, heads=1, d_ff=16)
    save_checkpoint(tmp_path / "plain", config, random_weights(config))
    with pytest.raises(UserError, match="widths 16"):
        quantize_checkpoint(tmp_path / "plain", tmp_path / "q", Scheme(32, 4))
    model = Transformer(wide())
    quantize(model, Scheme(32, 4))
    with pytest.raises(UserError, match="already"):
        quantize(model, Scheme(32, 4))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda w: w["embedding.scales"].__setitem__((3, 1), np.nan), "embedding.scales is not finite"),
        (lambda w: w.pop("embedding.biases"), "missing embedding.biases"),
        (lambda w: w.pop("embedding.scales"), "embedding.weight is"),
        (lambda w: w.update({"embedding.scales": w["embedding.scales"][:, :1]}), "embedding.scales is"),
        (lambda w: w.update({"embedding.weight": w["embedding.weight"].astype(np.float32)}), "embedding.weight is F32"),
        (lambda w: w.update({"embedding.biases": w["embedding.biases"].astype(np.int32)}), "embedding.biases is I32"),
    ],
)
def test_damage_is_named(damage, said, model, tmp_path):
    source = open_checkpoint(model(Scheme(64, 4)))
    stored = {name: array.copy() for name, array in source.stored()}
    damage(stored)
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "config.json").write_text((source.folder / "config.json").read_text(encoding="utf-8"))
    save_file(stored, tmp_path / "q" / WEIGHTS)
    with pytest.raises(UserError, match=said):
        Transformer.load(tmp_path / "q")
    with pytest.raises(UserError, match=said):
        export_onnx(tmp_path / "q", tmp_path / "onnx")
