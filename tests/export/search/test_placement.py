"""Where a search file's weights are: ONNX Runtime copies those of inner graphs and packs none from two levels above."""

from __future__ import annotations

import onnx
import pytest
from combined import combined
from ending_models import POST_NORM, SIZES, made
from onnx import helper

from export.search import export_search
from export.search.options import ALL_LOGITS
from export.search.steps import STEPS

PRODUCTS = {"MatMul": 1, "Gemm": 1, "MatMulInteger": 1, "DynamicQuantizeMatMul": 1, "MatMulIntegerToFloat": 1}
"""Operator: which of its inputs is packed."""


def inner_graphs(graph):
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner = helper.get_attribute_value(attribute)
                yield inner
                yield from inner_graphs(inner)


@pytest.mark.parametrize(("target", "precision"), combined(["portable", "cpu"], ["float32", "int8"]))
def test_matrices_are_stored_outside_and_constant_inside(tmp_path, target, precision):
    _, checkpoint = made(tmp_path, **POST_NORM)
    file = export_search(checkpoint, tmp_path / "search.onnx", target=target, precision=precision, force=True)
    graph = onnx.load(file).graph
    outside = {tensor.name for tensor in graph.initializer if len(tensor.dims) > 1}
    graphs = list(inner_graphs(graph))
    assert not [tensor.name for inner in graphs for tensor in inner.initializer if len(tensor.dims) > 1]

    folded = []
    for name in (STEPS, ALL_LOGITS):
        (inner,) = (inner for inner in graphs if inner.name == name)
        made_here = {node.output[0]: node for node in inner.node}
        weights = [node.input[PRODUCTS[node.op_type]] for node in inner.node if node.op_type in PRODUCTS]
        assert not outside & set(weights)
        here = [weight for weight in weights if weight in made_here and outside & set(made_here[weight].input)]
        assert {made_here[weight].op_type for weight in here} <= {"Reshape", "Transpose"}
        folded += here
    # Of each layer: four of the self-attention, two across the source (keys and values are made outside), two of the
    # feed-forward net; and the classifier.
    assert len(folded) == 8 * SIZES["decoder_layers"] + 1
