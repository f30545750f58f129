"""`validate` on packages of target cpu: equal ones pass for every kind of model, a wrong value doesn't."""

import io
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from certified import assert_beams
from combined import thinned, thinned_rows
from covering_configs import COVERING, config_of, configs, name_of
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from onnx.external_data_helper import load_external_data_for_model
from random_models import random_weights
from rich.console import Console
from small_models import encoder_decoder

from export import OnnxTransformer, export_onnx
from export.__main__ import main
from export.package.plan import describe_graphs
from export.runtime.folder import open_folder
from export.validate import compare, validate_command
from export.validate.checks.free_running import MOST_NEW_TOKENS, WITHOUT_LIMIT, borders
from export.validate.points import tap_names
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

ENCODER_DECODERS = [choice for choice in COVERING if config_of(choice).architecture == "encoder-decoder"]
TIED = TransformerConfig(
    vocab_size=40, d_model=16, heads=4, d_ff=24, encoder_layers=1, decoder_layers=1, max_positions=24,
    logit_scale=2.0, logit_cap=0.5,
)  # fmt: skip
"""Its likeliest logits are the cap but for 1e-9: runtimes choose differently and write other, equally good texts."""
PRECISIONS = ["float32", "float16", "bfloat16", "int8", "int8-weights", "int4"]


def written(folder: Path, config, seed=1, **options) -> tuple[Path, Path]:
    save_checkpoint(folder / "model", config, random_weights(config, seed))
    return folder / "model", export_onnx(folder / "model", folder / "cpu", target="cpu", **options)


def assert_agreement(config, folder: Path, seed: int) -> None:
    checkpoint, cpu = written(folder, config, seed)
    report = compare(checkpoint, cpu, ["onnxruntime"], seed, threads=1)
    assert report.equal, "\n".join([*report.failures(), f"seed {seed}", config.to_json()])
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, config.source_vocab_size, n).tolist() for n in rng.integers(1, config.max_positions + 1, 6)]
    portable = OnnxTransformer(export_onnx(checkpoint, folder / "portable"), threads=1)
    options = {"beam": 3, "n_best": 3, "max_new_tokens": config.max_positions}
    results = [model.search(rows, **options) for model in (OnnxTransformer(cpu, threads=1), portable)]
    assert_beams(checkpoint, rows, options, *results)


@pytest.mark.slow
@pytest.mark.parametrize("choice", thinned(ENCODER_DECODERS, 54), ids=name_of)
def test_every_choice(choice, tmp_path):
    assert_agreement(config_of(choice), tmp_path, seed=sum(choice))


@pytest.mark.slow
@settings(max_examples=80, phases=[Phase.explicit, Phase.reuse, Phase.generate], deadline=None)
@given(config=configs().filter(lambda c: c.architecture == "encoder-decoder"), seed=st.integers(0, 2**32 - 1))
@example(config=TIED, seed=2)
def test_any_config(config, seed):
    with tempfile.TemporaryDirectory() as folder:
        assert_agreement(config, Path(folder), seed)


def test_every_precision_and_what_is_said(tmp_path):
    config = encoder_decoder("paper")
    checkpoint, cpu = written(tmp_path, config, precision=PRECISIONS, force=True)
    report = compare(checkpoint, cpu, ["mlx", *(f"onnxruntime:cpu:all:{p}" for p in PRECISIONS)], seed=2, threads=1)
    assert report.equal, report.failures()
    assert [r.precision for r in report.runtimes[1:]] == PRECISIONS
    # Beside MLX, whose every tap is there: what a runtime shows, and one line on the rest.
    taps = tap_names(config)
    assert {p.tap for p in report.points if p.runtime == "mlx"} == set(taps)
    for runtime, note in zip(report.runtimes[1:], report.notes, strict=True):
        tapped = {p.tap for p in report.points if (p.runtime, p.path) == (runtime.name, "tapped")}
        assert {"encoder.embedding", "encoder.layers.1", "decoder.layers.1", "logits"} <= tapped
        assert tapped == set(taps) - set(runtime.missing_taps)
        assert note.startswith(f"{runtime.name}: not compared, because the fused graphs have no such value: ")
        assert "decoder.layers.*.self_attention" in note
        searches = {t.search: t.tokens for t in report.tokens if t.runtime == runtime.name}
        bare = {"top-1, teacher-forced", "greedy", "sampling", "beam 4"}
        rules = {"greedy, with rules", "beam 4, with rules"}
        listed = open_folder(cpu, runtime.precision).listed  # int4 has no such graphs
        among = {"greedy, among candidates", "beam 4, among candidates"} if listed else set()
        assert set(searches) == bare | rules | among | {*borders(config, MOST_NEW_TOKENS), WITHOUT_LIMIT}
        assert min(searches[name] for name in bare) > 20
    places = {s.runtime: (s.products, s.softmaxes) for s in report.structures}
    assert len(places) == len(PRECISIONS) + 1
    out = io.StringIO()
    report.print(Console(file=out, width=200))
    assert "the fused graphs have no such value" in out.getvalue()


def changed(package: Path, graph: str, name: str) -> None:
    """Move one value of an initializer by a thousandth."""
    path = package / "onnx" / f"{graph}.onnx"
    model = onnx.load(path, load_external_data=False)
    load_external_data_for_model(model, str(path.parent))
    tensor = next(t for t in model.graph.initializer if t.name == name)
    values = onnx.numpy_helper.to_array(tensor).copy()
    values.flat[3] *= 1.5
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("graph", "name"),
    thinned_rows(
        [
            ("encoder_cpu", "decoder.layers.0.cross_attention.value_proj.weight"),
            ("encoder_cpu", "encoder.layers.1.feed_forward.down_proj.weight"),
            ("decoder_cpu", "decoder.layers.1.self_attention.query_proj.weight"),
        ],
        3,
    ),
)
def test_a_wrong_weight(graph, name, tmp_path):
    checkpoint, cpu = written(tmp_path, encoder_decoder("modern"))
    changed(cpu, graph, name)
    out = io.StringIO()
    console = Console(file=out, width=200)
    options = dict(runtimes=["onnxruntime"], seed=1, console=console)
    assert validate_command(checkpoint, cpu, **options) == 2  # its digest tells already
    assert validate_command(checkpoint, cpu, **options, verify=False) == 1
    assert f"{graph}.onnx: {name}: 1 of " in out.getvalue()
    assert "first over budget: " in out.getvalue()


def test_a_wrong_attribute(tmp_path):
    """Which no comparison of weights finds. The fused attention shows no value before the feed-forward network's."""
    checkpoint, cpu = written(tmp_path, encoder_decoder("paper"))
    path = cpu / "onnx" / "decoder_cpu.onnx"
    model = onnx.load(path, load_external_data=False)
    node = next(n for n in model.graph.node if n.op_type == "DecoderMaskedMultiHeadAttention")
    next(a for a in node.attribute if a.name == "scale").f *= 1.01
    path.write_bytes(model.SerializeToString())
    report = compare(checkpoint, cpu, ["onnxruntime"], seed=1, threads=1, searches=False)
    assert report.exit_code == 1
    assert report.first_over_budget("onnxruntime").tap == "decoder.layers.0.feed_forward"


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("evaluator", "was exported for target cpu, whose operators only onnxruntime has, not evaluator"),
        ("wasm", "not wasm"),
        ("onnxruntime:cuda", "was exported for target cpu, onnxruntime:cuda can't run it"),
    ],
)
def test_other_runtimes(runtime, message, tmp_path, capsys):
    checkpoint, cpu = written(tmp_path, encoder_decoder("paper"))
    assert main(["validate", str(checkpoint), str(cpu), "--runtimes", runtime]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_facts(tmp_path):
    _, cpu = written(tmp_path, encoder_decoder("paper"))
    facts = describe_graphs(cpu)
    names = ("encoder_cpu", "decoder_cpu", "classifier_rows_cpu", "decoder_listed_cpu")
    assert set(facts) == {f"onnx/{name}.onnx" for name in names}
    assert ("cross.0.key", "float", "sentences x 4 x source_length x 8") in facts["onnx/encoder_cpu.onnx"]["outputs"]
