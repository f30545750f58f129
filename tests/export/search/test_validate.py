"""`validate` on one file with the search inside: its weights, and what it finds, against the reference's own search."""

from __future__ import annotations

import io
from pathlib import Path

import onnx
import pytest
from combined import SLOW, combined, thinned
from onnx import numpy_helper
from quantized_models import wide
from random_models import random_weights
from rich.console import Console
from small_models import CHOICES, encoder_decoder

from export import export_search
from export.__main__ import main
from export.graph.protos import initializers
from export.search.metadata import CONFIG
from export.search.runtime import SearchModel
from export.validate import compare
from export.validate.checks.free_running import MOST_NEW_TOKENS, WITHOUT_LIMIT, borders
from export.validate.report.html import page
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.system.errors import UserError

SEARCHES = {"greedy", "sampling", "beam 4", "greedy, with rules", "beam 4, with rules"}
SEARCHES |= {"greedy, among candidates", "beam 4, among candidates", WITHOUT_LIMIT}
AT_BORDERS = {*borders(encoder_decoder("paper"), MOST_NEW_TOKENS)}  # of a few tokens
SEARCHES |= AT_BORDERS


def checkpoint_of(folder: Path, config, seed: int = 1) -> Path:
    save_checkpoint(folder / "model", config, random_weights(config, seed))
    return folder / "model"


@pytest.mark.fast("modern-cpu-options1")
@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        pytest.param("paper", "portable", {}, marks=SLOW),  # layers of two kinds: targets/test_layer_pattern.py
        ("modern", "cpu", {}),
        ("paper", "cpu", {"precision": "int8", "force": True}),
        pytest.param("modern", "portable", {"external": True}, marks=SLOW),
        pytest.param("paper", "portable", {"precision": "float16", "force": True}, marks=SLOW),
    ],
)
def test_tokens_scores_and_weights(name, target, options, tmp_path):
    config = encoder_decoder(name)
    checkpoint = checkpoint_of(tmp_path, config)
    path = export_search(checkpoint, tmp_path / "search.onnx", target=target, **options)
    engines = ["onnxruntime"] if options or target == "cpu" else None  # MLX computes what it did
    report = compare(checkpoint, path, engines, longest=16, threads=1)
    assert report.equal, (report.seed, report.failures())
    (runtime,) = (r for r in report.runtimes if r.search_only)
    assert runtime.precision == options.get("precision", "float32")
    searches = {t.search: t.tokens for t in report.tokens if t.runtime == "onnxruntime"}
    assert set(searches) == SEARCHES
    bare = [count for name, count in searches.items() if "rules" not in name and name not in AT_BORDERS]
    assert min(bare) > 20  # rules may end after few tokens
    # int8: what is multiplied and what is looked up of one table have scales of their own, and are two checks.
    checks = [check for check in report.weights if check.runtime == "onnxruntime"]
    assert max(check.count for check in checks) == len(parameter_shapes(config))
    assert len(checks) == 1 + (options.get("precision") == "int8" and config.tie_embeddings != "none")
    console = Console(file=io.StringIO(), record=True, width=200)
    report.print(console)
    for text in (console.export_text(), page(report)):
        assert "a file with the search inside returns nothing else" in text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), combined(CHOICES, ["portable", "cpu"], step=18))
def test_every_option(name, target, tmp_path):
    checkpoint = checkpoint_of(tmp_path, encoder_decoder(name), seed=2)
    path = export_search(checkpoint, tmp_path / "search.onnx", target=target)
    report = compare(checkpoint, path, ["onnxruntime"], longest=12, threads=1)
    assert report.equal, (report.seed, report.failures())
    assert {t.search for t in report.tokens} == SEARCHES


@pytest.mark.slow  # the same file against MLX's search: test_graph.py
@pytest.mark.parametrize("precision", thinned(["packed", "float32"], 2))
def test_quantised_by_mlx(precision, tmp_path):
    plain = checkpoint_of(tmp_path, wide())
    quantize_checkpoint(plain, tmp_path / "q", Scheme(32, 4))
    path = export_search(tmp_path / "q", tmp_path / "search.onnx", precision=precision)
    report = compare(tmp_path / "q", path, ["onnxruntime"], longest=12, threads=1)
    assert report.equal, (report.seed, report.failures())


def weight(graph: onnx.GraphProto) -> None:
    name = "decoder.layers.1.feed_forward.up_proj.weight"
    tensor = next(t for t in initializers(graph) if t.name == name)
    values = numpy_helper.to_array(tensor).copy()
    values[0, 1] += 1e-6
    tensor.CopyFrom(numpy_helper.from_array(values, name))


def multiplier(graph: onnx.GraphProto) -> None:
    """Other noise, which nobody would notice in the distribution."""
    tensor = next(t for t in initializers(graph) if t.name == "philox.upper")
    values = numpy_helper.to_array(tensor) + 2
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def norms(graph: onnx.GraphProto) -> None:
    """Their epsilon, a hundred times as large, everywhere."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                norms(attribute.g)
            elif attribute.name == "epsilon":
                attribute.f = 1e-1


@pytest.mark.fast("multiplier-sampling", "weight-decoder.layers.1.feed_forward.up_proj.weight: 1 of ")
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (weight, "decoder.layers.1.feed_forward.up_proj.weight: 1 of "),
        (multiplier, "sampling"),
        (norms, "beam 4"),
    ],
)
def test_mistakes_are_found(edit, said, tmp_path):
    checkpoint = checkpoint_of(tmp_path, encoder_decoder("paper"))
    path = export_search(checkpoint, tmp_path / "search.onnx")
    model = onnx.load(path)
    before = model.SerializeToString()
    edit(model.graph)
    assert model.SerializeToString() != before
    path.write_bytes(model.SerializeToString())
    searches = edit is not weight
    report = compare(checkpoint, path, ["onnxruntime"], seed=3, longest=8, threads=1, searches=searches)
    assert report.exit_code == 1
    assert any(said in line for line in report.failures())
    if edit is multiplier:
        assert {t.search for t in report.tokens if not t.passed} == {"sampling"}


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("evaluator", "is one file; evaluator needs the folder of an exported model"),
        ("onnxruntime:cpu:none", "is one file: give only its provider"),
    ],
)
def test_refused(runtime, message, tmp_path, capsys):
    checkpoint = checkpoint_of(tmp_path, encoder_decoder("paper"))
    path = export_search(checkpoint, tmp_path / "search.onnx")
    assert main(["validate", str(checkpoint), str(path), "--runtimes", runtime]) == 2
    assert message in capsys.readouterr().err


def test_of_another_checkpoint(tmp_path, capsys):
    path = export_search(checkpoint_of(tmp_path / "a", encoder_decoder("paper")), tmp_path / "search.onnx")
    other = checkpoint_of(tmp_path / "b", wide())
    assert main(["validate", str(other), str(path), "--runtimes", "onnxruntime"]) == 2
    assert "not exported from" in capsys.readouterr().err
    same_sizes = checkpoint_of(tmp_path / "c", encoder_decoder("paper"), seed=2)
    assert not compare(same_sizes, path, ["onnxruntime"], seed=1, longest=8, threads=1, searches=False).equal


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("null", "expected a JSON object, found NoneType"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"vocab_size": 9, "max_positions": 9223372036854775808}', "max_positions=9223372036854775808 must be"),
    ],
    ids=["null", "cut", "deep", "absurd"],
)
def test_a_file_whose_config_is_damaged(held, said, tmp_path):
    path = export_search(checkpoint_of(tmp_path, encoder_decoder("paper")), tmp_path / "search.onnx")
    model = onnx.load(path)
    next(entry for entry in model.metadata_props if entry.key == CONFIG).value = held
    path.write_bytes(model.SerializeToString())
    with pytest.raises(
        UserError, match=f"search.onnx: TransformerConfig: .*{said}.*; write it again with export --search$"
    ):
        SearchModel(path)
