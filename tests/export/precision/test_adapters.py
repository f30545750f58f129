"""An adapter beside the integers of a checkpoint, exported: proven as any other model, and mistakes in it found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from adapter_models import kept
from combined import SLOW, slow
from onnx import numpy_helper
from quantized_models import ENCODER

from export import export_onnx, export_search
from export.validate import compare
from export.validate.checks.weights import check_weights
from export.validate.engines.mlx_engine import MlxEngine
from export.validate.engines.stored import merged_in_float64
from mlx_transformer.cli import main
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.system.files import read_json

pytestmark = pytest.mark.gpu_path
BOTH = ["float32", "packed"]
DECODER = dict(architecture="decoder", encoder_layers=0, tie_embeddings="target-output")
NAME = "decoder.layers.0.self_attention.query_proj.weight"


def changed(path: Path, part: str, place: int = 5) -> str:
    """One bit of one number of an initializer in a graph's file, whose name is returned."""
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if t.name.endswith(f"query_proj.{part}") or t.name == part)
    values = numpy_helper.to_array(tensor).copy()
    values.view(f"u{values.itemsize}").flat[place] ^= 1 << (20 if values.itemsize == 4 else 49)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for file in path.parent.glob("*.onnx_data"):
        assert file.is_file()
    path.write_bytes(model.SerializeToString())
    return tensor.name


@pytest.mark.parametrize(
    ("kind", "target", "changes", "searches"),
    [
        pytest.param("lora", "portable", {}, False, marks=SLOW),
        ("dora", "portable", DECODER, False),
        pytest.param("dora", "portable", DECODER, True, marks=SLOW),
        ("dora", "cpu", ENCODER | {"attention_bias": True}, False),
        pytest.param("dora", "cpu", {"attention_bias": True}, False, marks=SLOW),
        ("lora", "web", ENCODER, False),
    ],
)
def test_what_was_trained_is_what_is_proven(kind, target, changes, searches, tmp_path):
    """Weights bit for bit, every tap, caches, tokens, and MLX's integers with the adapter beside them."""
    checkpoint = kept(tmp_path, kind, Scheme(32, 4), **changes)
    package = export_onnx(checkpoint, tmp_path / "onnx", target=target, precision=BOTH, force=True)
    report = compare(checkpoint, package, seed=1, longest=10, threads=1, searches=searches)
    assert report.equal, report.failures()
    assert {r.runtime for r in report.points} >= {"mlx", "onnxruntime", "onnxruntime:cpu:all:packed"}
    plain = compare(tmp_path / "integers", package, ["onnxruntime"], seed=1, longest=6, threads=1, searches=False)
    assert not plain.equal  # it is another model than its base


@slow
def test_the_integers_stay_integers(tmp_path):
    """As many products of integers as without the adapter, and two small ones beside each that it changes."""
    checkpoint = kept(tmp_path, "dora", Scheme(32, 4), **ENCODER)
    counts = []
    for name in ("integers", "kept"):
        export_onnx(tmp_path / name, tmp_path / f"{name}-onnx", precision=BOTH, force=True)
        graph = onnx.load(tmp_path / f"{name}-onnx" / "onnx" / "model_packed.onnx", load_external_data=False).graph
        counts.append(Counter(node.op_type for node in graph.node))
    added = counts[1] - counts[0]
    maps = len(open_checkpoint(checkpoint).adapted_integers)
    assert maps == 6
    assert added == {"MatMul": 2 * maps, "Add": maps, "Mul": maps}
    sizes = [(tmp_path / f"{name}-onnx" / "onnx" / "model.onnx_data").stat().st_size for name in ("integers", "kept")]
    adapter = (checkpoint / "adapter.safetensors").stat().st_size
    assert sizes[0] < sizes[1] < sizes[0] + 1.5 * adapter
    facts = read_json(tmp_path / "kept-onnx" / "mlx_transformer.json")
    assert facts["adapter"] == {"kind": "dora", "rank": 3, "alpha": 5.0, "linear_maps": 6, "beside_integers": 6}
    assert set(facts["source"]) == {"model.safetensors", "adapter.safetensors"}


@pytest.mark.fast(
    "packed-decoder.layers.0.self_attention.query_proj.weight.lora_a-decoder.layers.0.self_attention.query_proj.weight"
)
@pytest.mark.parametrize(
    ("precision", "part", "name"),
    [
        ("float32", "lora_a", NAME),
        ("float32", "gain", NAME),
        pytest.param("float32", "factor", NAME, marks=SLOW),
        ("packed", f"{NAME}.lora_a", NAME),
        pytest.param("packed", f"{NAME}.lora_b", NAME, marks=SLOW),
        ("packed", f"{NAME}.gain", NAME),
    ],
)
def test_mistakes_are_found(precision, part, name, tmp_path):
    """In one number, and by the matrix that it belongs to."""
    checkpoint = kept(tmp_path, "dora", Scheme(32, 4), **DECODER)
    package = export_onnx(checkpoint, tmp_path / "onnx", precision=precision, force=True)
    graph = package / "onnx" / ("model.onnx" if precision == "float32" else "model_packed.onnx")
    changed(graph, part, 0)
    report = compare(checkpoint, package, ["onnxruntime"], seed=1, longest=6, threads=1, searches=False)
    problems = [problem for check in report.weights for problem in check.problems]
    assert report.exit_code == 1
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}: ")


def test_a_mistake_in_mlx_is_found(tmp_path):
    checkpoint = kept(tmp_path, "lora", Scheme(32, 4), **DECODER)
    opened = open_checkpoint(checkpoint)
    engine, stored = MlxEngine(opened), dict(opened.tensors())
    assert not [p for check in check_weights(engine, stored) for p in check.problems]
    layer = engine.model.decoder.layers[0].self_attention.query_proj
    layer.lora_b = layer.lora_b * 1.001
    problems = [p for check in check_weights(engine, stored) for p in check.problems]
    assert [problem.partition(":")[0] for problem in problems] == [NAME]


def test_only_ties_of_float32_may_fall_otherwise(tmp_path):
    opened = open_checkpoint(kept(tmp_path, "dora", Scheme(32, 4), **DECODER))
    exact = opened.tensor(NAME)
    assert merged_in_float64(opened, NAME, exact)(exact).tobytes() == exact.tobytes()
    beside = np.nextafter(exact, np.float32(9))
    assert (merged_in_float64(opened, NAME, beside)(exact) == exact).mean() > 0.999


def test_one_file_with_the_search_inside(tmp_path):
    checkpoint = kept(tmp_path, "lora", Scheme(32, 4), encoder_layers=1, decoder_layers=1)
    file = export_search(checkpoint, tmp_path / "packed.onnx", precision="packed", force=True)
    report = compare(checkpoint, file, ["onnxruntime"], seed=1, longest=6, threads=1)
    assert report.equal, report.failures()


def test_another_adapter_is_another_model(tmp_path, capsys):
    """Not replaced without being asked, and shown by `info`."""
    checkpoint = kept(tmp_path, "lora", Scheme(32, 4), **ENCODER)
    package = export_onnx(checkpoint, tmp_path / "onnx", force=True)
    export_onnx(checkpoint, package, force=True)
    main(["info", str(package)])
    assert "lora of rank 3, alpha 5: 6 linear maps, 6 of them beside integers" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(tmp_path / "integers"), str(package)])
    assert "holds another ONNX folder" in capsys.readouterr().err
