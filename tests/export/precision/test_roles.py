"""What a lower precision does with a matrix or an operator follows from what was said where the graph was built, not
from names or kinds of operators."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from combined import combined
from random_models import random_weights
from small_models import alone, encoder_decoder

from export import export_onnx
from export.graph.builder import GraphBuilder
from export.graph.built import forget
from export.nn.marks import FULL_PRECISION, Role
from export.nn.norms import RMSNorm
from export.nn.primitives import Embedding, Linear, Parameter, full_precision, name_parameters
from export.precision.blocks import weight_only
from export.precision.half import half
from export.precision.products import linears, lookups
from export.precision.rounding import BLOCK, block_rows
from export.precision.table import ONNXRUNTIME, PRECISIONS
from export.validate import compare
from export.validate.findings import ON_INTEGERS
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import Head
from mlx_transformer.core.int8_scales import INT8_SCALES, Int8Scales, ProductScales, multiplied_names
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.system.manifest import write_manifest

FLOAT16 = ir.DataType.FLOAT16


def of_norm_and_square() -> ir.Model:
    """z = x^2 / 4, in sixteen bits as all else, and y = RMSNorm(x). Both squares are of the same x and the same 2."""
    g = GraphBuilder("squares")
    x = g.input("x", "batch_size", 8)
    norm = RMSNorm(8, 1e-6)
    name_parameters(norm)
    z = g.op.Div(g.op.Pow(x, 2.0), 4.0)
    y = norm(g.op, x)
    g.output("y", y, "batch_size", 8)
    g.output("z", z, "batch_size", 8)
    return g.model()


def types_of(node: ir.Node) -> set[ir.DataType]:
    """Of a node's operands, as far as an initializer or a Cast tells, without axes."""
    producers = [x.producer() for x in node.inputs]
    found = {ir.DataType(p.attributes.get_int("to")) for p in producers if p is not None and p.op_type == "Cast"}
    return found | {x.dtype for x in node.inputs if x.is_initializer()} - {ir.DataType.INT64}


def test_only_what_is_said_to_stay_float32_does() -> None:
    model = of_norm_and_square()
    half(model, FLOAT16)
    chain = [node for node in model.graph if node.op_type in ("Pow", "ReduceMean", "Add", "Sqrt", "Div")]
    wide = [node for node in chain if FULL_PRECISION in node.meta]
    assert sorted(node.op_type for node in wide) == ["Add", "Div", "Pow", "ReduceMean", "Sqrt"]
    square, quotient = (node for node in chain if node not in wide)
    assert types_of(square) == types_of(quotient) == {FLOAT16}
    assert {kind for node in wide for kind in types_of(node)} == {ir.DataType.FLOAT}
    weight = model.graph.initializers["weight"]
    weight.const_value = ir.tensor(np.ones(8, np.float16), name="weight")
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    x = np.full((1, 8), 300, np.float32)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    y, z = session.run(["y", "z"], {"x": x})
    np.testing.assert_allclose(y, 1, rtol=1e-3)
    assert (z >= 300**2 / 4).all()  # on a CPU float16's infinity or the value itself, as its kernels are float32


def test_the_same_chain_in_another_place_is_marked_by_the_context_alone() -> None:
    g = GraphBuilder("marked")
    x = g.input("x", "batch_size", 4)
    with full_precision(g.op):
        y = g.op.Exp(x)
    g.output("y", g.op.Relu(y), "batch_size", 4)
    model = g.model()
    half(model, FLOAT16)
    (exp,) = (node for node in model.graph if node.op_type == "Exp")
    before, (after, _) = exp.inputs[0].producer(), next(iter(exp.outputs[0].uses()))
    assert (before.op_type, before.attributes.get_int("to")) == ("Cast", ir.DataType.FLOAT)
    assert (after.op_type, after.attributes.get_int("to")) == ("Cast", FLOAT16)


def of_tables() -> ir.Model:
    """Tables whose names say the opposite of what they are."""
    g = GraphBuilder("tables")
    ids = g.input("ids", "batch_size", dtype="int64")
    words, scores = Embedding(32, 32, Role.EMBEDDING), Parameter([32, 32], Role.ADDED)
    inner, classifier = Linear(32, 32, bias=False), Linear(32, 40, bias=False, role=Role.CLASSIFIER)
    words.weight.name, scores.name = "positions.words.weight", "embedding.weight"
    inner.weight.name, classifier.weight.name = "output_proj.weight", "last.weight"
    g.graph.initializers["embedding.weight"] = scores
    x = g.op.Add(words(g.op, ids), g.op.Gather(scores, ids, axis=0))
    g.output("logits", classifier(g.op, inner(g.op, x)), "batch_size", 40)
    return g.model()


def test_roles_not_names_choose_what_is_quantised() -> None:
    model = of_tables()
    assert [lookup.table.name for lookup in lookups(model)] == ["positions.words.weight"]
    assert [(linear.weight.name, linear.is_table) for linear in linears(model)] == [
        ("output_proj.weight", False),
        ("last.weight", True),
    ]
    weight_only(model, 4, "int8", ONNXRUNTIME, fused=True, blocks_in_tables=True)
    stored = {name: value.dtype for name, value in model.graph.initializers.items()}
    assert stored["embedding.weight"] == ir.DataType.FLOAT
    assert {"positions.words.weight.uint8_rows", "output_proj.weight.uint4", "last.weight.uint8"} <= stored.keys()


@pytest.mark.fast("cpu")
@pytest.mark.parametrize("target", ["portable", "cpu", "web"])
def test_numbers_by_relative_position_stay_as_they_are(target, tmp_path) -> None:
    """A table of two dimensions, and no matrix."""
    config = TransformerConfig(**{**encoder_decoder("paper").to_dict(), "positions": "relative"})
    weights = random_weights(config, 3)
    checkpoint = save_checkpoint(tmp_path / "model", config, weights)
    folder = export_onnx(checkpoint, tmp_path / "onnx", target=target, precision=["int8", "int4"])
    found = 0
    for path in (folder / "onnx").glob("*.onnx"):
        for tensor in onnx.load(path).graph.initializer:
            if tensor.name.endswith("positions.weight"):
                assert onnx.numpy_helper.to_array(tensor).tobytes() == weights[tensor.name].tobytes()
                found += 1
            assert not tensor.name.startswith(("encoder.positions.weight.", "decoder.positions.weight."))
    assert found >= 4


TIED = alone("paper", "encoder")
ENCODER = dataclasses.replace(TIED, head=Head(kind="hidden"))
ENCODERS = {"whole blocks": ENCODER, "a part of one": dataclasses.replace(ENCODER, d_model=40)}


def table_of(folder, suffix="_quantized"):
    """The initializers of the table, and those that products read."""
    graph = onnx.load(folder / "onnx" / f"model{suffix}.onnx").graph
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    return {name: array for name, array in tensors.items() if name.startswith("embedding.weight")}


def exported(config, folder, as_before=False, **options):
    """as_before: by a table that has one scale a row in any case, as packages of earlier versions have."""
    checkpoint = save_checkpoint(folder / "model", config, random_weights(config, 3), texts=options.pop("texts", {}))
    with pytest.MonkeyPatch.context() as patch:
        if as_before:
            roles = {role.name: role for role in Role} | {"LOOKED_UP": Role.EMBEDDING}
            patch.setattr("export.nn.model.Role", SimpleNamespace(**roles))
            forget()
        package = export_onnx(checkpoint, folder / "onnx", **options)
    if as_before:
        forget()
    return checkpoint, package


@pytest.mark.fast("whole blocks-portable-int8", "a part of one-web-int8-weights", "a part of one-cpu-int4")
@pytest.mark.parametrize(
    ("name", "target", "precision"),
    combined(ENCODERS, ["portable", "cpu", "web"], ["int8", "int8-weights", "int4"]),
)
def test_an_encoder_s_own_table_is_in_blocks(name, target, precision, tmp_path):
    checkpoint, folder = exported(ENCODERS[name], tmp_path, target=target, precision=precision)
    table, w = table_of(folder, PRECISIONS[precision].suffix), random_weights(ENCODERS[name], 3)["embedding.weight"]
    q, scale = block_rows(w, 8, BLOCK)
    stored = {key: array for key, array in table.items() if array.size == q.size or array.size == w.size}
    assert len(stored) == 1
    assert next(iter(stored.values())).tobytes() == q.tobytes()
    np.testing.assert_array_equal(table["embedding.weight.uint8_scale"], scale)
    if precision == "int8":  # one operator where there are ONNX Runtime's own and blocks are whole
        one_operator = target == "cpu" and ENCODERS[name].d_model % BLOCK == 0
        assert ("embedding.weight.uint8_rows" in stored) == one_operator
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=9, threads=1)
    assert report.equal, report.failures()


@pytest.mark.parametrize("config", [TIED, alone("untied", "decoder")], ids=["tied", "decoder"])
def test_others_have_a_scale_a_row(config, tmp_path):
    _, folder = exported(config, tmp_path, precision="int8")
    names = onnx.load(folder / "onnx" / "model_quantized.onnx").graph.initializer
    assert any(tensor.name.endswith("embedding.weight.int8_rows") for tensor in names)


@pytest.mark.fast("False")
@pytest.mark.parametrize("fixed", [False, True])
def test_a_package_from_before_is_what_it_says(fixed, tmp_path):
    """A scale a row: numbers and weights agree, and the structure names what export writes otherwise now. With fixed
    scales the reference between the integers reads that table."""
    entry = {name: ProductScales(np.float32(20)) for name in multiplied_names(ENCODER)}
    texts = {INT8_SCALES: Int8Scales({n: entry.get(n, ProductScales()) for n in quantizable_shapes(ENCODER)}).json()}
    options = {"precision": "int8", **({"texts": texts} if fixed else {})}
    checkpoint, folder = exported(ENCODER, tmp_path, as_before=True, **options)
    assert "embedding.weight.int8_rows" in table_of(folder)
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=9, threads=1, searches=False)
    assert all(check.passed for check in (*report.points, *report.weights, *report.tokens)), report.failures()
    assert report.exit_code == 1
    (structure,) = report.structures
    assert all("embedding/Gather" in problem for problem in structure.wrong)
    assert "input 0, embedding.weight.uint8, is INT8(50, 32), has to be UINT8(50, 1, 32)" in " ".join(structure.wrong)
    assert any(point.path == ON_INTEGERS for point in report.points) == fixed
    now = export_onnx(checkpoint, tmp_path / "now", precision="int8")
    assert "embedding.weight.uint8" in table_of(now)
    report = compare(checkpoint, now, ["onnxruntime"], seed=5, longest=9, threads=1, searches=False)
    assert report.equal, report.failures()


@pytest.mark.parametrize("changed", ["uint8", "uint8_scale"])
def test_another_number_in_a_table_is_noticed(changed, tmp_path):
    checkpoint, folder = exported(ENCODER, tmp_path, precision="int8")
    path = folder / "onnx" / "model_quantized.onnx"
    model = onnx.load(path)
    tensor = next(each for each in model.graph.initializer if each.name == f"embedding.weight.{changed}")
    array = onnx.numpy_helper.to_array(tensor).copy()
    array[7].flat[0] = array[7].flat[0] + 1 if changed == "uint8" else array[7].flat[0] * np.float32(1.001)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, path)
    write_manifest(folder / "onnx")
    report = compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=5, threads=1, searches=False)
    assert any("embedding.weight: " in problem for check in report.weights for problem in check.problems)
