"""Packages of lower precision: graphs judged by the rule, weights bit for bit, what is stored, how one is chosen."""

import dataclasses
import json
import re

import numpy as np
import onnx
import pytest
from combined import combined, thinned
from random_models import random_weights
from small_models import alone, encoder_decoder

from export import OnnxTransformer, export_onnx
from export.interface import Request
from export.precision.passes import lower
from export.precision.table import PRECISIONS
from export.targets.table import target_of
from export.validate import compare
from export.validate.engines.stored import restored
from export.validate.reference import Reference
from export.validate.reference.search import token_by_token
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.decoding.options import Options
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import write_manifest

LOWER = [name for name in PRECISIONS if name not in ("float32", "packed")]
PAPER = encoder_decoder("paper")
WIDE = dataclasses.replace(PAPER, d_model=64, d_ff=96, d_k=16, d_v=16, vocab_size=200, source_vocab_size=200)
MODELS = {
    "paper": PAPER,
    "odd widths": encoder_decoder("odd widths"),
    "decoder": alone("modern", "decoder"),
    "encoder": alone("untied", "encoder"),
}
ROWS = [[5, 6, 7, 8, 2], [9, 2], [10, 11, 12, 2]]


@pytest.fixture(scope="module", params=thinned(MODELS, 4))
def package(request, tmp_path_factory):
    """(checkpoint, package, its precisions beside float32): all of the first model, one of a kind of the others"""
    chosen = LOWER if request.param == "paper" else ["float16", "int8", "int4"]
    return *written(MODELS[request.param], tmp_path_factory.mktemp("precision"), ["float32", *chosen]), chosen


def written(config, folder, precision, **options):
    checkpoint = save_checkpoint(folder / "model", config, random_weights(config, 7))
    return checkpoint, export_onnx(checkpoint, folder / "onnx", precision=precision, **options)


def graphs(folder, suffix):
    return sorted((folder / "onnx").glob(f"*{suffix}.onnx"))


def test_every_precision_is_within_its_budget(package):
    checkpoint, folder, chosen = package
    """What lower precision changes in a search is `test_cpu_validate.py`'s question."""
    runtimes = [f"onnxruntime:cpu:all:{p}" for p in chosen]
    report = compare(checkpoint, folder, runtimes, seed=5, longest=9, threads=1, searches=False)
    assert report.equal, report.failures()
    assert {runtime.precision for runtime in report.runtimes} == {*chosen}


def test_all_files_are_standard_and_keep_their_inputs_and_outputs(package):
    _, folder, chosen = package
    for name in chosen:
        precision = PRECISIONS[name]
        for path in graphs(folder, precision.suffix):
            model = onnx.load(path, load_external_data=False)
            assert {node.domain for node in model.graph.node} == {""}
            assert [entry.version for entry in model.opset_import if not entry.domain] == [precision.opset]
            plain = onnx.load(path.with_name(path.name.replace(precision.suffix, "")), load_external_data=False)
            for part in ("input", "output"):
                ours, theirs = (list(getattr(m.graph, part)) for m in (model, plain))
                assert [v.name for v in ours] == [v.name for v in theirs]
                assert [v.type.tensor_type.elem_type for v in ours] == [v.type.tensor_type.elem_type for v in theirs]


@pytest.mark.slow  # each target by itself is in make test
@pytest.mark.parametrize("target", thinned(["cpu", "web"], 2))
def test_the_other_targets_say_what_the_portable_one_says(target, tmp_path):
    _, folder = written(WIDE, tmp_path, LOWER, target=target)
    _, portable = written(WIDE, tmp_path / "portable", LOWER)
    for precision in LOWER:
        found = OnnxTransformer(folder, precision=precision, threads=1).search(ROWS, max_new_tokens=6)
        expected = OnnxTransformer(portable, precision=precision, threads=1).search(ROWS, max_new_tokens=6)
        close = 0.02 if precision == "float16" else 0.15
        for a, b in zip(found, expected, strict=True):
            assert a[0].score == pytest.approx(b[0].score, rel=close), precision


@pytest.mark.slow
@pytest.mark.parametrize("target", thinned(["web", "cpu", "portable"], 3))
def test_an_embedding_that_products_and_residuals_read_as_it_is(target, tmp_path):
    """Neither scaled nor with positions, nor a norm before the first layer: what replaces the lookup feeds them all."""
    bare = dataclasses.replace(PAPER, positions="none", scale_embeddings=False, norm_placement="post")
    checkpoint, folder = written(bare, tmp_path, ["int8", "int4"], target=target)
    chosen = [f"onnxruntime:cpu:all:{p}" for p in ("int8", "int4")]
    report = compare(checkpoint, folder, chosen, seed=5, longest=9, threads=1, searches=False)
    assert report.equal, report.failures()


@pytest.mark.parametrize(("precision", "target"), combined(["int8", "int8-weights", "int4"], ["portable", "web"]))
def test_what_the_files_hold_is_what_numpy_quantises(precision, target, tmp_path):
    _, folder = written(WIDE, tmp_path, precision, target=target)
    weights, shapes = random_weights(WIDE, 7), parameter_shapes(WIDE)
    found = {}
    for path in graphs(folder, PRECISIONS[precision].suffix):
        tensors = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
        for name, array, round_trip in restored(tensors, shapes):
            assert array.dtype == np.float32
            assert np.asarray(array).tobytes() == round_trip(weights[name]).tobytes(), name
            found[name] = array
    assert found.keys() == {name for name, shape in shapes.items() if len(shape) == 2}


@pytest.mark.parametrize("bits", thinned([4, 8], 2))
def test_another_scale_in_a_file_is_noticed(bits, tmp_path):
    precision = "int8" if bits == 8 else "int4"
    checkpoint, folder = written(PAPER, tmp_path, precision)
    path = folder / "onnx" / f"encoder_model{PRECISIONS[precision].suffix}.onnx"
    model = onnx.load(path)
    scale = next(t for t in model.graph.initializer if re.search(r"feed_forward.*scale(_\d+)?$", t.name))
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * np.float32(1.001), scale.name))
    onnx.save(model, path)
    write_manifest(folder / "onnx")
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=5, threads=1, searches=False)
    assert any("differ in their bits" in problem for check in report.weights for problem in check.problems)
    assert not report.equal


def test_tied_weights_are_stored_once(tmp_path):
    """Embedding and classifier read the same integers, in every graph, and on the web in two shapes."""
    size = WIDE.vocab_size * WIDE.d_model
    matrices = sum(int(np.prod(s)) for s in parameter_shapes(WIDE).values() if len(s) == 2)
    rest = WIDE.max_positions * WIDE.d_model * 4 + 40 * 600
    _, folder = written(WIDE, tmp_path, "int8", external_threshold=0)
    assert matrices <= (folder / "onnx" / "model_quantized.onnx_data").stat().st_size <= matrices + rest
    _, folder = written(WIDE, tmp_path / "web", "int8-weights", target="web", external_threshold=0)
    data = (folder / "onnx" / "decoder_model_merged_int8.onnx_data").stat().st_size
    decoder = sum(int(np.prod(s)) for n, s in parameter_shapes(WIDE).items() if len(s) == 2 and n.startswith("decoder"))
    assert data < 1.125 * (decoder + size) + rest


@pytest.mark.parametrize("name", ["paper", "odd widths"])
def test_float16_has_no_infinity_and_casts_at_the_edges_alone(name):
    config = MODELS[name]
    for graph in target_of("portable").graph_names(config):
        model = target_of("portable").build(graph, Request(config=config))
        lower(model, "float16", target_of("portable").lowering)
        for value in model.graph.initializers.values():
            assert value.dtype.name != "FLOAT"
            if value.const_value is not None and value.dtype.name == "FLOAT16":
                assert np.isfinite(value.const_value.numpy()).all()
        edges = [v for v in (*model.graph.inputs, *model.graph.outputs) if v.dtype.name == "FLOAT"]
        casts = [n for n in model.graph.all_nodes() if n.op_type == "Cast" and n.attributes.get_int("to") in (1, 10)]
        assert len(casts) == len(edges)


def test_a_value_beyond_float16_is_refused(tmp_path):
    weights = random_weights(PAPER, 7)
    weights["embedding.weight"][3, 3] = 7e4
    checkpoint = save_checkpoint(tmp_path / "model", PAPER, weights)
    with pytest.raises(UserError, match=r"embedding\.weight has values beyond float16's range"):
        export_onnx(checkpoint, tmp_path / "onnx", precision="float16")
    assert not (tmp_path / "onnx").exists()


def test_a_folder_says_what_it_holds_and_gives_what_is_asked_for(tmp_path):
    _, folder = written(PAPER, tmp_path, ["int8", "int4"])
    said = json.loads((folder / "mlx_transformer.json").read_text(encoding="utf-8"))
    blocks = {"suffix": "_q4", "activations": "int8", "blocks": "standard"}
    assert said["precisions"] == {"int8": {"suffix": "_quantized"}, "int4": blocks}
    assert said["target"] == "portable"
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["transformers.js_config"]["dtype"] == "q8"
    with pytest.raises(UserError, match="holds int8 and int4; choose"):
        OnnxTransformer(folder)
    assert OnnxTransformer(folder, precision="int4", threads=1).folder.precision == "int4"
    with pytest.raises(UserError, match="holds int8 and int4, not float32: choose"):
        OnnxTransformer(folder, precision="float32")
    with pytest.raises(UserError, match="precision 'int3' is unknown; choose from float32"):
        export_onnx(tmp_path / "model", tmp_path / "other", precision=["float32", "int3"])
    with pytest.raises(UserError, match="target 'gpu'"):
        target_of("gpu")


def test_the_reference_draws_up_to_the_last_learned_position():
    """What a runtime of lower precision drew is compared with this when the two part."""
    config = alone("odd widths", "decoder")
    prompt = [5, 6, 7]
    limit = config.max_positions - len(prompt) + 1
    options = Options(max_new_tokens=limit, sample=True, seed=4)
    (tokens, _), *_ = token_by_token(Reference(config, random_weights(config, 1)), [prompt], options)
    assert len(tokens) == limit
