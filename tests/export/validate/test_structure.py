"""The structure check: counts and uses of the real graphs, and what it says when something is missing."""

from pathlib import Path

import onnx
import pytest
from combined import thinned
from random_models import write_model
from small_models import configs

from export.validate import assert_equal, compare
from export.validate.checks.structure import Structure, expected_counts, structures
from export.validate.engines import open_engine
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.parameters import parameter_shapes

CONFIGS = configs()


def counted(checkpoint: Path, exported: Path, *runtimes: str) -> list[Structure]:
    opened = open_checkpoint(checkpoint)
    return list(structures([open_engine(name, opened, exported, 1) for name in runtimes]))


@pytest.mark.parametrize("name", thinned(CONFIGS, 2))
def test_both_sides_have_the_operations_of_the_architecture(name: str, tmp_path: Path) -> None:
    counts = counted(*write_model(CONFIGS[name], tmp_path, 1), "mlx", "onnxruntime")
    assert [s.runtime for s in counts] == ["mlx", "onnxruntime"]
    for s in counts:
        assert s.passed, s.problem
        assert (s.products, s.softmaxes) == expected_counts(CONFIGS[name])
        assert s.parameters == len(parameter_shapes(CONFIGS[name]))


def test_the_paper_s_base_model_by_hand() -> None:
    """6 + 6 layers: 18 attentions of 6 products, 12 networks of 2, one classifier."""
    config = CONFIGS["paper"]
    assert expected_counts(config) == (6 * 6 + 2 * 4 + 1, 6)


def test_a_parameter_without_use_and_a_product_too_many_are_told(tmp_path: Path) -> None:
    checkpoint, exported = write_model(CONFIGS["paper, encoder"], tmp_path, 1)
    path = exported / "onnx" / "model.onnx"
    model = onnx.load(path)
    add = next(n for n in model.graph.node if n.name.startswith("encoder/layers.1/feed_forward/up_proj/Add"))
    add.op_type = "Identity"
    del add.input[1]
    onnx.save(model, path)
    (s,) = counted(checkpoint, exported, "onnxruntime")
    assert s.unused == ("encoder.layers.1.feed_forward.up_proj.bias",)
    assert s.problem == "no way to the output from encoder.layers.1.feed_forward.up_proj.bias"
    assert Structure("x", 5, 1, (4, 1), 3, ()).problem.startswith("5 matrix products and 1 softmaxes, the architecture")


def test_the_assertion_for_a_test_suite(tmp_path: Path) -> None:
    checkpoint, exported = write_model(CONFIGS["paper"], tmp_path / "one", 1)
    assert assert_equal(checkpoint, exported, seed=1, threads=1).equal
    _, other = write_model(CONFIGS["paper"], tmp_path / "two", 2)
    with pytest.raises(AssertionError, match=r"differ \(seed 1\): .*values differ in their bits.*culprit: ") as failed:
        assert_equal(checkpoint, other, ["onnxruntime"], seed=1, threads=1)
    assert "\n" not in str(failed.value)


def test_what_does_not_run_has_no_operation_at_fault(tmp_path: Path) -> None:
    checkpoint, exported = write_model(CONFIGS["paper"], tmp_path, 1)
    file = exported / "onnx" / "encoder_model.onnx"
    graph = onnx.load(file, load_external_data=False)
    del graph.graph.output[:]
    onnx.save(graph, file)
    report = compare(checkpoint, exported, ["onnxruntime"], seed=1, threads=1)
    assert any("failed: graph: has no output 'last_hidden_state'" in line for line in report.failures())
    assert report.culprits == ()
