"""Integers chosen by search and by GPTQ: right values, moments of a pass, what is lost, the same integers in ONNX."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from small_models import DECODER, write_text_model

from export import OnnxTransformer, export_onnx
from export.precision.packed import nearest_zeros
from export.validate import compare
from mlx_transformer import Transformer
from mlx_transformer.cli import main
from mlx_transformer.convert import calibrate
from mlx_transformer.convert.calibrate import Example, logits_of, moments, read_examples
from mlx_transformer.convert.quantize import DAMPING, SHRINKS, Calibration, gptq, grid, quantize_checkpoint, searched
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.parameters import embedding_names, quantizable_shapes
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.generation.likelihood import divergence
from mlx_transformer.nn.quantize import quantized

WIDE = {"d_model": 64, "d_ff": 128}
LINES = [f"{a} {b} {c}." for a in ("one", "two", "three") for b in ("four", "five") for c in ("six", "größer")]


def zero_points(packed):
    """Whole zero points (O, G); None if a group has none."""
    zeros, rest = nearest_zeros(packed)
    return zeros if rest is None else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    write_text_model(place, **WIDE, **DECODER)
    (place / "text").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return place


def inputs(seed: int, count: int, width: int) -> np.ndarray:
    """Rows with very unequal columns that depend on each other, as hidden states are."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((count, width)) @ rng.standard_normal((width, width)) / np.sqrt(width)
    return (mixed * np.exp(rng.standard_normal(width))).astype(np.float32)


def test_gptq_puts_the_error_into_the_columns_that_are_left():
    """The same integers as by least squares, solved anew for the columns that are left after each column."""
    w = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    x, scheme = inputs(2, 200, 64), Scheme(32, 3)
    got = gptq(w, x.T @ x, scheme)
    h = (x.T @ x).astype(np.float64)
    size = np.diag(h).copy()
    scales, zeros = grid(w, scheme, np.maximum(size, DAMPING * size.mean()).astype(np.float32))
    h += DAMPING * size.mean() * np.eye(64)
    order, left = np.argsort(-size, kind="stable"), w.astype(np.float64)
    q = np.zeros(w.shape)
    for i, column in enumerate(order):
        scale, zero = scales[:, column // 32], zeros[:, column // 32]
        q[:, column] = np.clip(np.rint(left[:, column] / scale + zero), 0, 7)
        done, rest = order[: i + 1], order[i + 1 :]
        lost = scales[:, done // 32] * (q[:, done] - zeros[:, done // 32]) - w[:, done]
        left[:, rest] = w[:, rest] - np.linalg.solve(h[np.ix_(rest, rest)], h[np.ix_(rest, done)] @ lost.T).T
    assert (got.integers() == q).mean() > 0.99  # but for ties that float32 breaks otherwise
    np.testing.assert_array_equal(got.scales, scales)
    np.testing.assert_array_equal(zero_points(got), zeros)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_each_method_loses_less_than_the_one_before(bits):
    w, x, scheme = (
        np.random.default_rng(3).standard_normal((48, 128)).astype(np.float32),
        inputs(4, 400, 128),
        Scheme(64, bits),
    )
    made = [quantized(w, scheme), searched(w, scheme), gptq(w, x.T @ x, scheme)]
    errors = [np.square(each.dequantised() - w).mean() for each in made]
    outputs = [np.square(x @ (each.dequantised() - w).T).mean() for each in made]
    assert errors[1] < errors[0]
    assert outputs[2] < 0.7 * min(outputs[:2])
    assert all(zero_points(each) is not None for each in made)


@pytest.mark.parametrize("of_inputs", [False, True])
def test_rows_that_quantisers_stumble_over(of_inputs):
    rng = np.random.default_rng(5)
    w = rng.standard_normal((6, 64)).astype(np.float32)
    w[0], w[1], w[2], w[3, :32] = 0, 0.25, np.abs(w[2]) + 3, -1e-30
    w[4, 7] = 1e4
    x = inputs(6, 50, 64)
    x[:, 9] = 0  # a column that nothing reads
    scheme = Scheme(32, 4)
    made = gptq(w, x.T @ x, scheme) if of_inputs else searched(w, scheme)
    values = made.dequantised()
    assert np.isfinite(values).all()
    assert zero_points(made) is not None
    assert not values[0].any()
    np.testing.assert_allclose(values[1], 0.25, rtol=1e-6)
    assert np.abs(values - w).max() <= 1e4 / 15


def test_the_whole_range_is_tried_first():
    """Numbers that lie on a grid are kept."""
    q = np.random.default_rng(7).integers(0, 16, (4, 64)).astype(np.float32)
    q[:, ::32], q[:, 1::32] = 0, 15
    w = (q - 6) * np.float32(0.125)
    assert SHRINKS[0] == 1
    np.testing.assert_allclose(searched(w, Scheme(32, 4)).dequantised(), w, atol=1e-7)


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_moments_are_of_what_the_maps_read(memory, tmp_path, monkeypatch):
    """In one pass and in a pass for each map; the memory and the classifier's input are known by other ways."""
    monkeypatch.setattr(calibrate, "MEMORY", memory)
    write_text_model(tmp_path, tie_embeddings="none")
    model = Transformer.load(tmp_path / "model")
    examples = [Example(([5, 6, 7], [1, 8]), [8, 2]), Example(([9, 4], [1, 3, 3]), [3, 3, 2])]
    tables = embedding_names(model.config)
    paths = [name.removesuffix(".weight") for name in quantizable_shapes(model.config) if name not in tables]
    found = {tuple(readers): sums for readers, sums in moments(model, paths, examples)}
    assert sorted(path for readers in found for path in readers) == sorted(paths)
    layers = len(model.decoder.layers)
    memories = [mx.flatten(model.encode([list(e.ids[0])]), 0, 1) for e in examples]
    of_memory = next(key for key in found if "decoder.layers.0.cross_attention.key_proj" in key)
    assert len(of_memory) == 2 * layers  # keys and values of all layers read it
    hidden = [mx.flatten(model.hidden(*([list(ids)] for ids in e.ids)), 0, 1) for e in examples]
    for key, rows in ((of_memory, memories), (("output_proj",), hidden)):
        expected = sum(np.array(x).T.astype(np.float64) @ np.array(x) for x in rows)
        np.testing.assert_allclose(found[key], expected, atol=1e-5 * np.abs(expected).max())
    assert type(model.output_proj).__name__ == "Linear"  # nothing watches any more


def test_later_maps_see_what_was_rounded_before(folder, monkeypatch):
    monkeypatch.setattr(calibrate, "MEMORY", 1)
    model = Transformer.load(folder / "model")
    examples, _ = read_examples(model, folder / "text")
    first, last = "decoder.layers.0.feed_forward.down_proj", "decoder.layers.1.feed_forward.down_proj"
    plain = {readers[0]: sums for readers, sums in moments(model, [first, last], examples)}
    changed = {}
    for readers, sums in moments(model, [first, last], examples):
        changed[readers[0]] = sums
        layer = dict(model.named_modules())[readers[0]]
        layer.weight = layer.weight * 2
    np.testing.assert_array_equal(changed[first], plain[first])
    assert np.abs(changed[last] - plain[last]).max() > 0.01 * np.abs(plain[last]).max()


def test_text_is_halved_and_cut(folder):
    model = Transformer.load(folder / "model")
    calibrating, judging = read_examples(model, folder / "text")
    tokenizer = model.tokenizer
    rows = tokenizer.prompts(LINES)
    for examples, expected in ((calibrating, rows[::2]), (judging, rows[1::2])):
        assert [(e.ids, e.labels) for e in examples] == [((row[:-1],), row[1:]) for row in expected]


def test_divergence_by_hand():
    wide, other = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), np.log([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    pairs = [((wide + 3, other - 4), [1, 0])]
    lost = divergence(lambda pair: pair, pairs)
    assert (lost.texts, lost.tokens, lost.agreement, lost.same) == (1, 2, 0.5, 0)
    assert lost.kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2)
    assert lost.perplexity_wide == pytest.approx((0.25 * 0.1) ** -0.5)
    assert lost.perplexity == pytest.approx((0.5 * 0.1) ** -0.5)


def test_gptq_of_a_model_loses_less_and_says_how_much(folder, tmp_path):
    """What is printed is what the written checkpoint loses, with MLX's kernels."""
    said = {}
    for method in ("nearest", "gptq"):
        how = Calibration(method=method, text=folder / "text", accept_loss=True)
        said[method] = quantize_checkpoint(folder / "model", tmp_path / method, Scheme(32, 4), how=how)
    wide = Transformer.load(folder / "model")
    _, judging = read_examples(wide, folder / "text")
    lost = {}
    for method, text in said.items():
        model = Transformer.load(tmp_path / method)
        lost[method] = divergence(
            lambda e, m=model: (logits_of(wide, e), logits_of(m, e)), [(e, e.labels) for e in judging]
        )
        assert f"KL {lost[method].kl:.4f}" in text
    assert lost["gptq"].kl < 0.8 * lost["nearest"].kl


def test_onnx_has_the_same_integers_and_the_rule_holds(folder, tmp_path):
    how = Calibration(method="gptq", text=folder / "text", accept_loss=True)
    quantize_checkpoint(folder / "model", tmp_path / "q", Scheme(32, 4), how=how)
    opened = open_checkpoint(tmp_path / "q")
    tables = embedding_names(opened.config)
    bits = {name: 8 if name in tables else 4 for name in quantizable_shapes(opened.config)}
    assert {name: scheme.bits for name, scheme in opened.quantization.items()} == bits
    assert all(zero_points(opened.packed(name)) is not None for name in opened.quantization)
    package = export_onnx(tmp_path / "q", tmp_path / "onnx", precision=["float32", "packed"])
    report = compare(tmp_path / "q", package, longest=12, threads=1, searches=False)
    assert report.equal, (report.seed, report.failures())


def test_a_mean_of_bits_goes_where_it_matters(folder, tmp_path):
    """As many matrices of 8 bits as the mean allows; it loses less than without them."""
    told = {}
    for bits in (None, 5.0):
        how = Calibration(text=folder / "text", bits=bits, accept_loss=True)
        told[bits] = quantize_checkpoint(folder / "model", tmp_path / str(bits), Scheme(32, 4), how=how)
    opened = open_checkpoint(tmp_path / "5.0")
    shapes = quantizable_shapes(opened.config)
    size = {name: int(np.prod(shapes[name])) for name in opened.quantization}
    assert {scheme.bits for scheme in opened.quantization.values()} == {4, 8}
    mean = sum(scheme.bits * size[name] for name, scheme in opened.quantization.items()) / sum(size.values())
    assert 4.5 < mean <= 5
    kl = {bits: float(text.split("KL ")[1].split(",")[0]) for bits, text in told.items()}
    assert kl[5.0] < 0.9 * kl[None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--method", "gptq"], "method gptq: needs text like the model's later input: give some with --text"),
        (["--bits", "4.5"], "a mean of 4.5 bits: needs text"),
        (["--mode", "mxfp4", "--method", "search"], "mode mxfp4: only method nearest"),
        (["--bits", "9"], "9"),
        (["--text", "empty"], "has 0 lines; give at least 2"),
        (
            ["--text", "text", "--bits", "2"],
            "the limit is KL 0.2; take more bits, smaller groups or method gptq, or --accept-loss",
        ),
    ],
)
def test_what_cannot_be_quantised_is_said(options, said, folder, tmp_path, capsys, monkeypatch):
    (folder / "empty").write_text("\n\n", encoding="utf-8")
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit):
        main(["quantize", "model", str(tmp_path / "q"), "--group-size", "32", *options])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


def test_the_gate_judges_a_decoder_by_its_probabilities(folder, tmp_path):
    options = {"precision": ["float32", "int4"], "gate_source": folder / "text"}
    told = []
    package = export_onnx(folder / "model", tmp_path / "onnx", log=told.append, accept_loss=True, **options)
    record = json.loads((package / "mlx_transformer.json").read_text())["precisions"]["int4"]["quality"]
    models = [OnnxTransformer(package, precision=p) for p in ("float32", "int4")]
    rows = models[0].tokenizer.prompts(LINES)
    lost = divergence(
        lambda row: tuple(m.token_logits([row])[0] for m in models), [(row[:-1], row[1:]) for row in rows]
    )
    assert record["kl"] == pytest.approx(lost.kl)
    assert (record["perplexity"], record["perplexity_float32"]) == (lost.perplexity, lost.perplexity_wide)
    assert record["agreement"] == lost.agreement
    assert f"KL {lost.kl:.4f} from float32" in told[-1]
