"""What is remembered of nodes is what onnxscript says of each."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import ClassVar

import onnx_ir as ir
import onnxscript
import pytest
from combined import thinned
from small_models import encoder_decoder

from export.graph import builder, built
from export.graph import built as remembered
from export.interface import Request
from export.search.graph import search_model
from export.targets.table import TARGETS


class Compared(remembered.RememberingBuilder):
    """Asks onnxscript beside what is remembered."""

    asked: ClassVar = Counter[str]()

    def _infer_shapes(self, node: ir.Node) -> None:
        before = [(x.type, x.shape) for x in node.outputs]
        size = len(remembered._inferred)
        super()._infer_shapes(node)
        found = [(x.type, x.shape) for x in node.outputs]
        for x, (type_, shape) in zip(node.outputs, before, strict=True):
            x.type, x.shape = type_, shape
        onnxscript.GraphBuilder._infer_shapes(self, node)
        assert found == [(x.type, x.shape) for x in node.outputs], node
        new = len(remembered._inferred) > size
        self.asked["new" if new else "inside" if self.parent else "outside"] += 1
        if not new and any(each.type == ir.AttributeType.GRAPH for each in node.attributes.values()):
            self.asked["with branches"] += 1

    def _partition_inputs_attributes(self, schema, args, kwargs):
        found = super()._partition_inputs_attributes(schema, args, kwargs)
        inputs, attributes = onnxscript.GraphBuilder._partition_inputs_attributes(self, schema, args, kwargs)
        assert list(found[0]) == list(inputs)
        assert list(found[1].items()) == list(attributes.items())
        return found

    def _cast_inputs(self, schema, inputs):
        found = super()._cast_inputs(schema, inputs)
        if not any(isinstance(x, int | float | list) for x in inputs):  # of which onnxscript makes a constant each time
            assert list(found) == list(onnxscript.GraphBuilder._cast_inputs(self, schema, inputs))
        return found

    def _cast_attributes(self, schema, attributes):
        found = super()._cast_attributes(schema, attributes)
        for name, value in attributes.items():
            alone = ir.convenience.convert_attribute(name, value)
            assert (found[name].type, found[name].value) == (alone.type, alone.value)
        return found


@pytest.fixture
def compared(monkeypatch):
    monkeypatch.setattr(builder, "RememberingBuilder", Compared)
    built.forget()
    monkeypatch.setattr(remembered, "_inferred", {})
    monkeypatch.setattr(Compared, "asked", Counter())
    return Compared.asked


@pytest.mark.fast("paper")
@pytest.mark.parametrize("name", thinned(["odd widths", "modern", "paper"], 2))
def test_every_node_of_a_graph(compared, name):
    request = Request(config=encoder_decoder(name))
    for graph in TARGETS["portable"].graph_names(request.config):
        TARGETS["portable"].build(graph, request)
    assert compared["outside"] + compared["inside"] > compared["new"], compared


@pytest.mark.slow
def test_branches_and_bodies_of_a_loop_too(compared):
    search_model(Request(config=encoder_decoder("modern")), "portable")
    assert compared["inside"] > 200
    assert compared["with branches"] > 1


def test_values_of_small_constants_are_told_apart(compared):
    g = builder.GraphBuilder("sizes")
    x = g.input("x", "rows", 6)
    for shape in ([-1, 2, 3], [-1, 3, 2], [-1, 2, 3]):
        assert list(g.op.Reshape(x, shape).shape)[1:] == shape[1:]
    assert compared["new"] == 2


@pytest.mark.parametrize(
    ("inputs", "attributes"), [(1, {"axis": 0}), (3, {"axis": 0}), (2, {"axes": 0})], ids=["few", "many", "unknown"]
)
def test_what_is_wrong_is_refused(inputs, attributes):
    g = builder.GraphBuilder("wrong")
    gather = partial(g.op.Gather, **attributes)
    with pytest.raises(TypeError, match=r"not provided|a real number|Unexpected"):
        gather(*[g.input(f"x{i}", 2) for i in range(inputs)])
