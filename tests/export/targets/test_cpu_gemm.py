"""The pass that makes one Gemm of a Linear and what is added to it: the nodes it takes, and the same values after."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from export.targets.cpu.network import use_gemm

rng = np.random.default_rng(0)
ROWS, WIDTH, OUT = 3, 4, 5


class Built:
    """A graph of x (N, 4) with a weight W (5, 4), written node by node."""

    def __init__(self):
        self.nodes: list[ir.Node] = []
        self.x, self.residual = self.input("x", "N", WIDTH), self.input("residual", "N", OUT)
        self.vector = self.input("vector", OUT)
        self.weight = self.initializer("W", rng.standard_normal((OUT, WIDTH)))
        self.bias = self.initializer("bias", rng.standard_normal(OUT))
        self.outputs: list[ir.Value] = []

    @staticmethod
    def input(name, *shape):
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))

    @staticmethod
    def initializer(name, values):
        tensor = ir.tensor(values.astype(np.float32), name=name)
        return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)

    def node(self, operator, *inputs, **attributes):
        made = ir.node(operator, inputs, attributes or None, name=f"{operator}{len(self.nodes)}")
        made.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(made)
        return made.outputs[0]

    def product(self, x=None):
        return self.node("MatMul", self.x if x is None else x, self.node("Transpose", self.weight, perm=[1, 0]))

    def graph(self, *outputs):
        for value in outputs:
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["N", OUT])
        weights = [self.weight, self.bias]
        graph = ir.Graph(
            [self.x, self.residual, self.vector],
            outputs,
            nodes=self.nodes,
            initializers=weights,
            name="g",
            opset_imports={"": 20},
        )
        return ir.Model(graph, ir_version=9)


def run(model):
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = {"x": (ROWS, WIDTH), "residual": (ROWS, OUT), "vector": (OUT,)}
    draw = np.random.default_rng(1)
    feeds = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return session.run(None, {entry.name: feeds[entry.name] for entry in session.get_inputs()})


def bias(b):
    return [b.node("Add", b.product(), b.bias)]


def bias_first(b):
    return [b.node("Add", b.bias, b.product())]


def residual(b):
    return [b.node("Add", b.residual, b.product())]


def bias_and_residual(b):
    return [b.node("Add", b.residual, b.node("Add", b.product(), b.bias))]


def two_vectors(b):
    return [b.node("Add", b.node("Add", b.product(), b.bias), b.vector)]


def two_vectors_and_residual(b):
    return [b.node("Add", *two_vectors(b), b.residual)]


def alone(b):
    return [b.product()]


def used_twice(b):
    y = b.product()
    return [b.node("Add", y, b.bias), b.node("Add", y, b.residual)]


def also_an_output(b):
    y = b.product()
    return [y, b.node("Add", y, b.bias)]


def added_to_itself(b):
    y = b.product()
    return [b.node("Add", y, y)]


def sum_is_read_twice(b):
    y = b.node("Add", b.product(), b.bias)
    return [b.node("Add", y, b.residual), b.node("Relu", y)]


def of_one_another(b):
    """The same weight again, and a product as another one's residual."""
    return [b.node("Add", b.product(), b.product())]


def not_transposed(b):
    other = b.node("Reshape", b.weight, b.node("Constant", value_ints=[WIDTH, OUT]))
    return [b.node("MatMul", b.x, other)]


def of_a_computed_matrix(b):
    return [b.node("MatMul", b.x, b.node("Transpose", b.node("Neg", b.weight), perm=[1, 0]))]


# {graph: Gemms, MatMuls and Adds that are left}
CASES = {
    bias: (1, 0, 0),
    bias_first: (1, 0, 0),
    residual: (1, 0, 0),
    bias_and_residual: (1, 0, 1),
    two_vectors: (1, 0, 1),
    two_vectors_and_residual: (1, 0, 2),
    alone: (1, 0, 0),
    used_twice: (1, 0, 2),
    also_an_output: (1, 0, 1),
    added_to_itself: (1, 0, 1),
    sum_is_read_twice: (1, 0, 1),
    of_one_another: (2, 0, 0),
    not_transposed: (0, 1, 0),
    of_a_computed_matrix: (0, 1, 0),
}


@pytest.mark.parametrize("write", CASES, ids=lambda write: write.__name__)
def test_pass(write):
    built = Built()
    model = built.graph(*write(built))
    names = [value.name for value in model.graph.outputs]
    expected = run(model)
    use_gemm(model.graph)
    operators = [node.op_type for node in model.graph]
    assert tuple(map(operators.count, ("Gemm", "MatMul", "Add"))) == CASES[write]
    assert [value.name for value in model.graph.outputs] == names
    if write in (two_vectors, bias_and_residual):  # vectors are summed before the product, a matrix is added after it
        assert operators[-2:] == (["Add", "Gemm"] if write is two_vectors else ["Gemm", "Add"])
    for computed, right in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(computed, right, rtol=1e-5, atol=1e-6)
