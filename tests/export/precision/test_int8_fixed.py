"""int8 with fixed scales: the same integers in every target, whoever is computed with it; what is wrong is noticed."""

import dataclasses
import json
import re
import shutil
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import combined, thinned
from onnx import numpy_helper
from random_models import random_weights
from small_models import alone, encoder_decoder

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from export.interface import LISTED_CPU
from export.package.fixed_scales import observe, scales_of
from export.precision.int8 import BY_ROW
from export.precision.rounding import int8_rows
from export.runtime import sessions
from export.validate import compare
from export.validate.checks.int8 import ON_INTEGERS
from export.validate.engines import onnxruntime_engine
from export.validate.engines.onnxruntime_engine import EXACT, SATURATING, integer_kernel
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import (
    INT8_SCALES,
    SIGNED,
    SYMMETRIC,
    Int8Scales,
    multiplied_names,
    read_int8_scales,
)
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import write_manifest

PAPER = encoder_decoder("paper")
ONE_LAYER = dataclasses.replace(PAPER, encoder_layers=1, decoder_layers=1)
MODELS = {
    "paper": PAPER,
    "odd widths": encoder_decoder("odd widths"),
    "modern": encoder_decoder("modern"),
    "ssru": dataclasses.replace(PAPER, decoder_self_attention="ssru"),
    "decoder": alone("modern", "decoder"),
    "encoder": alone("untied", "encoder"),
}
TARGETS = ["portable", "cpu", "web"]
EXACT_HERE = integer_kernel() == EXACT
"""Otherwise the processor computes another network of weights that need more than its 16 bits for a sum of two."""


def site(name):
    """What the products share that read the same activations."""
    if re.search(r"cross_attention\.(key|value)_proj", name):
        return "memory"
    return re.sub(r"(?<=attention\.)(query|key|value)_|(?<=forward\.)(gate|up)_", "", name)


def scaled(config, weights, folder, overflow):
    """Scales of every form: those of random rows, every second site clipped evenly, every second matrix with a
    multiplier. overflow: with which sums of two products may need more than 16 bits."""
    plain = open_checkpoint(save_checkpoint(folder / "plain", config, weights))
    (folder / "graphs").mkdir()
    seen = scales_of(observe(plain, folder / "graphs", rows(30), rows(30, seed=2)), 100.0, config, BY_ROW, {})
    sites = list(dict.fromkeys(map(site, seen.products)))
    products = {}
    for i, (name, fixed) in enumerate(seen.products.items()):
        even = fixed.steps == SIGNED and sites.index(site(name)) % 2
        m = np.float32(127 / np.abs(weights[name]).max()) if i % 2 else None
        m = np.float32(1 / int8_rows(weights[name])[1].max()) if i % 2 and not overflow else m
        products[name] = dataclasses.replace(fixed, steps=SYMMETRIC if even else fixed.steps, weight=m)
    return Int8Scales(products, {"text": "drawn"})


@cache
def scales_for(config_json, overflow):
    """Of the weights that `saved` draws; what comes to each product is observed once for a config."""
    config = TransformerConfig.from_json(config_json)
    with tempfile.TemporaryDirectory() as folder:
        return scaled(config, random_weights(config, 7), Path(folder), overflow)


def saved(config, folder, change=lambda scales: scales, overflow=True):
    texts = {INT8_SCALES: change(scales_for(config.to_json(), overflow)).json()}
    return save_checkpoint(folder / "model", config, random_weights(config, 7), texts=texts)


def with_entries(**changes):
    """Replace fields of the entries whose names begin so."""

    def change(scales):
        products = {
            name: dataclasses.replace(entry, **next((c for key, c in changes.items() if name.startswith(key)), {}))
            for name, entry in scales.products.items()
        }
        return dataclasses.replace(scales, products=products)

    return change


def cut_to_a_quarter(scales):
    """What is read by a product keeps a quarter of its range."""
    products = {
        name: entry if entry.activation is None else dataclasses.replace(entry, activation=4 * entry.activation)
        for name, entry in scales.products.items()
    }
    return dataclasses.replace(scales, products=products)


def rows(count, longest=19, seed=1):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, 50, n).tolist(), 2] for n in rng.integers(0, longest + 1, count)]


def graphs(folder):
    return sorted((folder / "onnx").glob("*_quantized.onnx"))


@pytest.mark.fast("ssru-cpu", "decoder-portable", "encoder-web")
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("decoder", "portable"),
        ("encoder", "web"),
        ("ssru", "cpu"),
        *combined(["paper", "odd widths", "modern"], TARGETS, step=4),
    ],
)
def test_every_target_is_what_the_scales_say(name, target, tmp_path):
    """Between its integers as exact as float32 is; each of these a rounding of the reference's own activation."""
    checkpoint = saved(MODELS[name], tmp_path, overflow=EXACT_HERE or target != "web")
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="int8", target=target)
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=9, threads=1, searches=False)
    assert report.equal, report.failures()
    assert report.structures[0].attributes > len(multiplied_names(MODELS[name]))
    judged = {point.tap for point in report.points if point.path == ON_INTEGERS}
    assert judged >= {f"{each} (integers)" for each in multiplied_names(MODELS[name])}
    assert read_int8_scales(folder, MODELS[name]) == read_int8_scales(checkpoint, MODELS[name])


@pytest.mark.parametrize(("name", "target"), [("encoder", "web"), ("odd widths", "cpu")])
def test_what_scales_cut_is_no_error_of_the_runtime(name, target, tmp_path, monkeypatch):
    """A quarter of the range seen, on as few rows as a large model's: errors against float32 beyond int8's budget."""
    checkpoint = saved(MODELS[name], tmp_path, cut_to_a_quarter, overflow=EXACT_HERE or target != "web")
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="int8", target=target)
    monkeypatch.setattr(sys.modules[compare.__module__], "share_of", lambda config: 0.4)
    report = compare(checkpoint, folder, ["onnxruntime"], seed=2, longest=9, threads=1)
    assert report.equal, report.failures()
    monkeypatch.setattr(sys.modules[compare.__module__], "fixed_reference", lambda *_: None)
    alone = compare(checkpoint, folder, ["onnxruntime"], seed=2, longest=9, threads=1, searches=False)
    assert "over budget" in alone.failures()[0]


@pytest.mark.slow  # each target by itself is in make test
@pytest.mark.parametrize("name", thinned(["paper", "modern"], 2))
def test_all_targets_say_the_same(name, tmp_path):
    checkpoint, sources = saved(MODELS[name], tmp_path, overflow=EXACT_HERE), rows(12)
    said = []
    for target in TARGETS:
        folder = export_onnx(checkpoint, tmp_path / target, precision="int8", target=target)
        said.append(OnnxTransformer(folder, threads=1).search(sources, max_new_tokens=8))
    for target in ("portable", "cpu"):
        file = export_search(checkpoint, tmp_path / f"{target}.onnx", precision="int8", target=target)
        said.append(SearchModel(file, threads=1).search(sources, max_new_tokens=8))
    for found in said[1:]:
        assert [best.ids for best, *_ in found] == [best.ids for best, *_ in said[0]]
        for got, expected in zip(found, said[0], strict=True):
            assert got[0].score == pytest.approx(expected[0].score, rel=1e-4)


@pytest.mark.parametrize("overflow", [False, True])
def test_sums_that_need_more_than_16_bits_are_asked_for(overflow, tmp_path, monkeypatch):
    """Calibration chooses multipliers that need no more; those of a file are as they are."""
    ours = {"text": "valid.en", "percentile": 99.9}
    checkpoint = saved(PAPER, tmp_path, lambda s: s if overflow else dataclasses.replace(s, origin=ours), overflow)
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="int8", target="cpu")
    asked, plain = [], sessions.session_options
    monkeypatch.setattr(sessions, "session_options", lambda *given: asked.append(given[-1]) or plain(*given))
    assert len(OnnxTransformer(folder, threads=1).search(rows(3), max_new_tokens=4)) == 3
    assert set(asked) == {overflow}
    assert plain(1, may_overflow=True).get_session_config_entry("session.x64quantprecision") == "1"


def test_a_processor_that_cuts_sums_is_named(tmp_path, monkeypatch):
    """Where ONNX Runtime has no exact kernel: in branches and loops, and where nothing is optimised."""
    monkeypatch.setattr(onnxruntime_engine, "integer_kernel", lambda: SATURATING)
    said = "; sums of two products held to 16 bits by this processor, and some need more"
    for overflow, target in ((False, "web"), (True, "cpu"), (True, "web")):
        place = tmp_path / f"{target}-{overflow}"
        change = partial(dataclasses.replace, origin={} if overflow else {"percentile": 100.0})
        checkpoint = saved(ONE_LAYER, place, change, overflow)
        folder = export_onnx(checkpoint, place / "onnx", precision="int8", target=target)
        names = [f"onnxruntime:cpu:{level}:int8" for level in ("all", "none")]
        report = compare(checkpoint, folder, names, seed=5, longest=4, threads=1, searches=False)
        cut = [runtime.arithmetic == "int8" + said for runtime in report.runtimes]
        assert cut == [overflow and target == "web", overflow]


@pytest.mark.fast("cpu")
@pytest.mark.parametrize("form", thinned(["cpu", "portable", "search portable", "search cpu"], 2))
def test_a_sentence_is_the_same_whoever_is_computed_with_it(form, tmp_path):
    checkpoint, sources = saved(PAPER, tmp_path), rows(16)
    if form.startswith("search"):
        path = export_search(checkpoint, tmp_path / "s.onnx", precision="int8", target=form.split()[1])
        model = SearchModel(path, threads=1)
    else:
        model = OnnxTransformer(export_onnx(checkpoint, tmp_path / "onnx", precision="int8", target=form), threads=1)

    def search(given, **options):
        return [[(h.ids, h.score) for h in each] for each in model.search(given, max_new_tokens=8, beam=3, **options)]

    alone_each = [search([row])[0] for row in sources]
    assert search(sources[::-1]) == alone_each[::-1]
    order = np.random.default_rng(2).permutation(len(sources))
    assert search([sources[i] for i in order], batch_tokens=150) == [alone_each[i] for i in order]


def test_one_file_is_judged_too(tmp_path):
    checkpoint = saved(ONE_LAYER, tmp_path)
    file = export_search(checkpoint, tmp_path / "s.onnx", precision="int8", target="cpu")
    report = compare(checkpoint, file, ["onnxruntime"], seed=5, longest=6, threads=1)
    assert report.equal, report.failures()
    model = onnx.load(file)
    metadata = {entry.key: entry for entry in model.metadata_props}
    text = metadata["mlx_transformer.int8_scales"].value
    values = json.loads(text)
    values["products"]["embedding.weight"]["activation"] *= 1.01
    metadata["mlx_transformer.int8_scales"].value = json.dumps(values)
    onnx.save(model, file)
    (structure,) = compare(checkpoint, file, ["onnxruntime"], seed=5, longest=6, threads=1, searches=False).structures
    assert "embedding.weight: activations in units of" in structure.problem


def test_the_integers_are_those_of_the_multipliers(tmp_path):
    """A file's own: rounded halves to even, transposed to where a product reads them; rows of an embedding exactly."""
    weights = random_weights(PAPER, 7)
    scales = scaled(PAPER, weights, tmp_path, True)
    products = {
        name: dataclasses.replace(entry, weight=np.float32(127 / np.abs(weights[name]).max()))
        for name, entry in scales.products.items()
    }
    integers = {name: np.rint(weights[name] * entry.weight).astype(np.int8) for name, entry in products.items()}
    for name, entry in products.items():  # as an import has them: what the integers mean
        weights[name] = integers[name].astype(np.float32) * (np.float32(1) / entry.weight)
    texts = {INT8_SCALES: Int8Scales(products).json()}
    checkpoint = save_checkpoint(tmp_path / "model", PAPER, weights, texts=texts)
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="int8", target="cpu")
    found = {}
    for path in graphs(folder):
        for tensor in onnx.load(path).graph.initializer:
            name, _, kind = tensor.name.rpartition(".")
            if kind in ("int8", "int8_rows"):
                array = numpy_helper.to_array(tensor)
                found[name] = array if kind == "int8_rows" else array.T
            elif name in products and kind in ("scale", "scales"):
                assert (numpy_helper.to_array(tensor) == np.float32(1) / products[name].weight).all(), tensor.name
    assert found.keys() == products.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, integers[name], name)


def test_a_multiplier_of_other_weights_is_refused(tmp_path):
    name = "encoder.layers.0.feed_forward.up_proj.weight"
    checkpoint = saved(PAPER, tmp_path, with_entries(**{name: {"weight": np.float32(1000)}}))
    with pytest.raises(UserError, match=f"{name}: has other weights than its int8 scales are of"):
        export_onnx(checkpoint, tmp_path / "onnx", precision="int8")
    assert not (tmp_path / "onnx").exists()


def changed(folder, change):
    """The package with one node or initializer of its encoder changed."""
    path = graphs(folder)[0]
    model = onnx.load(path)
    change(model.graph)
    onnx.save(model, path)
    write_manifest(folder / "onnx")


def neighbours_scale(graph):
    first, second = [node for node in graph.node if node.op_type == "QuantizeLinear"][:2]
    second.input[1] = first.input[1]
    assert len({node.input[1] for node in graph.node if node.op_type == "QuantizeLinear"}) > 1


def neighbours_result(graph):
    product = next(node for node in graph.node if node.op_type == "MatMulIntegerToFloat")
    other = next(
        node for node in graph.node if node.op_type == "MatMulIntegerToFloat" and node.input[2] != product.input[2]
    )
    product.input[2] = other.input[2]


def other_zero_point(graph):
    zero = numpy_helper.from_array(np.uint8(127), "zero")
    graph.initializer.append(zero)
    product = next(node for node in graph.node if node.op_type == "MatMulIntegerToFloat")
    product.input[4] = "zero"


def without_clip(graph):
    clip = next(node for node in graph.node if node.op_type == "Clip" and node.output[0] in _read(graph))
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == clip.output[0]:
                node.input[i] = clip.input[0]
    graph.node.remove(clip)


def _read(graph):
    return {node.input[0] for node in graph.node if node.op_type == "MatMulIntegerToFloat"}


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    """(checkpoint, package of target cpu); nobody changes them."""
    return of_cpu(PAPER, tmp_path_factory.mktemp("paper"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return of_cpu(MODELS["encoder"], tmp_path_factory.mktemp("encoder"))


def of_cpu(config, folder):
    checkpoint = saved(config, folder)
    return checkpoint, export_onnx(checkpoint, folder / "onnx", precision="int8", target="cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (neighbours_scale, "activations in units of"),
        (neighbours_result, "its result is in units of"),
        (other_zero_point, "zero point 127 in the product, 128 where its activations are quantised"),
        (without_clip, "integers from None, of 127 steps"),
    ],
)
def test_what_another_product_has_is_noticed(change, said, encoder, tmp_path):
    checkpoint, folder = encoder[0], shutil.copytree(encoder[1], tmp_path / "onnx")
    changed(folder, change)
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=5, threads=1, searches=False)
    assert not report.equal
    assert any(said in problem for problem in report.structures[0].wrong), report.structures


def test_a_scale_that_the_package_itself_says_is_judged_by_its_integers(tmp_path):
    """The graph and its record changed alike: what is left is the checkpoint's own file."""
    config = MODELS["encoder"]
    checkpoint = saved(config, tmp_path)
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="int8")
    scales = read_int8_scales(folder, config)
    name = "encoder.layers.0.feed_forward.up_proj.weight"
    other = dataclasses.replace(scales.of(name), activation=np.float32(30))
    values = dataclasses.replace(scales, products={**scales.products, name: other}).json()
    (folder / INT8_SCALES).write_text(values, encoding="utf-8")
    write_manifest(folder)
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=5, threads=1, searches=False)
    problems = report.structures[0].wrong
    assert any(f"{name}: other scales than {INT8_SCALES} has" in problem for problem in problems)
    assert any(point.tap == f"{name} (integers)" and point.failures for point in report.points)


def operators(folder, kind):
    """Without the step that is the same but for its classifier."""
    paths = [path for path in graphs(folder) if LISTED_CPU not in path.name]
    return [node for path in paths for node in onnx.load(path).graph.node if node.op_type == kind]


def test_what_was_never_seen_has_a_scale_a_token(tmp_path):
    unseen = [name for name in multiplied_names(PAPER) if name.startswith("encoder.layers.0")]
    checkpoint = saved(PAPER, tmp_path, with_entries(**{"encoder.layers.0": {"activation": None, "steps": SYMMETRIC}}))
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision="int8", target="cpu")
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=5, threads=1, searches=False)
    assert report.equal, report.failures()
    assert len(operators(folder, "ReduceMax")) == len({site(name) for name in unseen})


def test_products_of_the_same_activations_share_their_integers(paper):
    folder = paper[1]
    products = operators(folder, "MatMulIntegerToFloat")
    read = {node.input[1].rpartition(".")[0]: node.input[0] for node in products}
    for name, integers in read.items():
        assert [other for other in read if site(other) == site(name)] == [
            other for other in read if read[other] == integers
        ]
    assert len(operators(folder, "QuantizeLinear")) == len({*map(site, read)})


def test_biases_are_inside_the_products_of_target_cpu(paper):
    folder = paper[1]
    inside = {node.input[6] for node in operators(folder, "MatMulIntegerToFloat") if len(node.input) > 6}
    biases = {name for name in parameter_shapes(PAPER) if name.endswith("_proj.bias")}
    assert biases
    assert inside == biases
