"""What a lower precision does with a matrix or an operator follows from what was said where the graph was built, not
from names or kinds of operators."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from random_models import random_weights
from small_models import encoder_decoder

from export import export_onnx
from export.graph.builder import GraphBuilder
from export.nn.marks import FULL_PRECISION, Role
from export.nn.norms import RMSNorm
from export.nn.primitives import Embedding, Linear, Parameter, full_precision, name_parameters
from export.precision.blocks import weight_only
from export.precision.half import half
from export.precision.products import linears, lookups
from export.precision.table import ONNXRUNTIME
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig

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
    words, scores = Embedding(32, 32), Parameter([32, 32], Role.ADDED)
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
