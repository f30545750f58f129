"""The structure check: counts and uses of the real graphs, and what it says when something is missing."""

import dataclasses
from pathlib import Path

import onnx
import pytest
from combined import thinned
from random_models import write_model
from small_models import configs

from export import export_onnx, export_search
from export.graph.protos import all_nodes
from export.validate import assert_equal, compare
from export.validate.checks.attributes import attributes
from export.validate.checks.structure import Structure, expected_counts, structures
from export.validate.engines import open_engine
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.parameters import parameter_shapes

CONFIGS = configs()


def counted(checkpoint: Path, exported: Path, *runtimes: str) -> list[Structure]:
    opened = open_checkpoint(checkpoint)
    return list(structures([open_engine(name, opened, exported, 1) for name in runtimes]))


@pytest.mark.parametrize("name", thinned(CONFIGS, 12))
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
    assert assert_equal(checkpoint, exported, ["onnxruntime"], seed=1, threads=1).equal
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
    report = compare(checkpoint, exported, ["onnxruntime"], seed=1, threads=1, searches=False)
    assert any("failed: graph: has no output 'last_hidden_state'" in line for line in report.failures())
    assert report.culprits == ()


def changed(file: Path, change) -> None:
    model = onnx.load(file, load_external_data=False)
    change(model.graph)
    onnx.save(model, file)


def norms(graph: onnx.GraphProto) -> list[onnx.AttributeProto]:
    return [a for node in all_nodes(graph) if node.op_type == "LayerNormalization" for a in node.attribute]


def test_an_epsilon_that_no_number_tells_is_told(tmp_path: Path) -> None:
    """Of the last norm of one graph; the pass that is counted need not run it."""
    config = CONFIGS["paper"]
    checkpoint, exported = write_model(config, tmp_path, 1)
    (before,) = counted(checkpoint, exported, "onnxruntime")
    norm_count = sum(".".join(name.split(".")[-2:]).endswith("norm.weight") for name in parameter_shapes(config))
    assert before.attributes >= 2 * norm_count
    assert before.passed

    def raise_epsilon(graph: onnx.GraphProto) -> None:
        attribute = [a for a in norms(graph) if a.name == "epsilon"][-1]
        attribute.f *= 3

    changed(exported / "onnx" / "decoder_with_past_model.onnx", raise_epsilon)
    (s,) = counted(checkpoint, exported, "onnxruntime")
    assert not s.passed
    assert len(s.wrong) == 1
    assert s.problem.startswith("decoder_with_past_model: decoder/layers.1/feed_forward_norm/")
    assert ": epsilon is 2.9999" in s.problem
    assert s.problem.endswith(", has to be 9.999999747378752e-06")
    report = compare(checkpoint, exported, ["onnxruntime"], seed=1, threads=1, searches=False)
    assert any(s.problem in line for line in report.failures())


def test_an_attribute_that_is_left_out_has_its_default(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIGS["paper, encoder"], norm_epsilon=1e-6)
    checkpoint, exported = write_model(config, tmp_path, 1)
    (before,) = counted(checkpoint, exported, "onnxruntime")

    def without(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            for a in [a for a in node.attribute if node.op_type == "LayerNormalization"]:
                node.attribute.remove(a)

    changed(exported / "onnx" / "model.onnx", without)
    (s,) = counted(checkpoint, exported, "onnxruntime")
    assert s.attributes == before.attributes
    assert all("epsilon is 1e-05, has to be 9.99" in problem for problem in s.wrong)
    assert s.problem.endswith(f"; and {len(s.wrong) - 1} more")


@pytest.mark.parametrize("operator", ["Softplus", "Tanh"])
def test_an_operator_that_no_rule_names_is_told(operator: str, tmp_path: Path) -> None:
    """It reads no number that could be compared; Tanh has a rule, in models whose options ask for one."""
    config = CONFIGS["paper, encoder"]
    _, exported = write_model(config, tmp_path, 1)
    file = exported / "onnx" / "model.onnx"

    def change(graph: onnx.GraphProto) -> None:
        next(node for node in graph.node if node.op_type == "Relu").op_type = operator

    changed(file, change)
    _, wrong = attributes({"model": file}, config)
    assert [problem.partition("/Relu")[0] for problem in wrong] == ["model: encoder/layers.0/feed_forward"]
    assert f"operator {operator}, which no rule names" in wrong[0]
    assert attributes({"model": file}, dataclasses.replace(config, logit_cap=2.0))[1] == wrong * (operator != "Tanh")


@pytest.mark.parametrize("added", [3e-5, None])
def test_the_epsilon_of_a_chain(added: float | None, tmp_path: Path) -> None:
    """RMSNorm is no operator in the graphs: its epsilon is a constant that is added, or not."""
    config = dataclasses.replace(CONFIGS["paper, encoder"], norm="rmsnorm")
    checkpoint, exported = write_model(config, tmp_path, 1)
    (before,) = counted(checkpoint, exported, "onnxruntime")
    assert before.passed

    def change(graph: onnx.GraphProto) -> None:
        makers = {output: node for node in graph.node for output in node.output}
        root = [node for node in graph.node if node.op_type == "Sqrt"][-1]
        add = makers[root.input[0]]
        if added is None:
            root.input[0] = add.input[0]
        else:
            graph.initializer.append(onnx.helper.make_tensor("other", onnx.TensorProto.FLOAT, [], [added]))
            add.input[1] = "other"

    changed(exported / "onnx" / "model.onnx", change)
    (s,) = counted(checkpoint, exported, "onnxruntime")
    assert s.attributes == before.attributes
    assert f": epsilon is {'2.99' if added else '0.0'}" in s.problem
    assert len(s.wrong) == (2 if added else 1)  # the sum that reads another constant is told as well


@pytest.mark.parametrize("target", ["cpu", "web"])
def test_attributes_of_other_targets(target: str, tmp_path: Path) -> None:
    checkpoint, _ = write_model(CONFIGS["paper"], tmp_path, 1)
    out = export_onnx(checkpoint, tmp_path / target, target=target)
    (s,) = counted(checkpoint, out, "onnxruntime")
    assert s.passed, s.problem
    file = next(path for path in (out / "onnx").glob("decoder*.onnx"))

    def change(graph: onnx.GraphProto) -> None:
        names = ("epsilon", "axis", "scale", "mask_filter_value", "num_heads")
        kinds = ("LayerNormalization", "Softmax", "MultiHeadAttention")
        told = [a for node in all_nodes(graph) if node.op_type in kinds for a in node.attribute if a.name in names]
        for a in told:
            a.f, a.i = a.f * 1.0000002, a.i + 1

    changed(file, change)
    count, wrong = attributes({file.stem: file}, CONFIGS["paper"])
    assert len({problem.split(": ")[2].split(" ")[0] for problem in wrong}) >= (5 if target == "cpu" else 2)
    assert count >= len(wrong)


@pytest.mark.slow
def test_the_search_s_own_graph(tmp_path: Path) -> None:
    checkpoint, _ = write_model(CONFIGS["paper"], tmp_path, 1)
    file = export_search(checkpoint, tmp_path / "m.onnx")
    (s,) = counted(checkpoint, file, "onnxruntime")
    assert s.passed, s.problem
    changed(file, lambda graph: [setattr(a, "f", 2e-5) for a in norms(graph) if a.name == "epsilon"])
    (s,) = counted(checkpoint, file, "onnxruntime")
    assert len(s.wrong) > 2


def test_a_number_that_no_rule_names_is_told(tmp_path: Path) -> None:
    """As of an operator that is new in the network: the exact check doesn't pass over what it doesn't know."""
    _, exported = write_model(CONFIGS["paper, encoder"], tmp_path, 1)
    file = exported / "onnx" / "model.onnx"
    count, wrong = attributes({"model": file}, CONFIGS["paper, encoder"])
    assert not wrong

    def capped(graph: onnx.GraphProto) -> None:
        last = graph.node[-1]
        graph.initializer.append(onnx.helper.make_tensor("cap", onnx.TensorProto.FLOAT, [], [30.0]))
        graph.node.append(
            onnx.helper.make_node("Div", [last.input[0], "cap"], ["more"], "encoder/layers.1/feed_forward/Div_node_999")
        )

    changed(file, capped)
    more, wrong = attributes({"model": file}, CONFIGS["paper, encoder"])
    assert more == count + 1
    (problem,) = wrong
    assert problem.startswith("model: encoder/layers.1/feed_forward/Div_node_999: its constant is 30.0")
