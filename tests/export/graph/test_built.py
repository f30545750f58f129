"""A graph is built once; whoever asks for it has a copy of his own, which is what would be built."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from combined import combined
from small_models import alone, encoder_decoder

from export.graph import built
from export.graph.built import built_once
from export.interface import DECODER_CPU, Request
from export.nn.marks import FULL_PRECISION, ROLE, ROWS_OF
from export.targets.table import TARGETS


def contents(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString(deterministic=True)


def marks(model: ir.Model) -> list[tuple[str, object]]:
    """What passes read beside the graph itself; of a value that another names, its name."""
    found: list[tuple[str, object]] = [
        (str(node.name), node.meta[FULL_PRECISION]) for node in model.graph.all_nodes() if FULL_PRECISION in node.meta
    ]
    found += [(str(value.name), value.meta[ROLE]) for value in model.graph.initializers.values() if ROLE in value.meta]
    marked = [value for value in built._values(model) if ROWS_OF in value.meta]
    return [*found, *((str(value.name), value.meta[ROWS_OF].name) for value in marked)]


@pytest.fixture(autouse=True)
def nothing_is_built():
    built.forget()
    yield
    built.forget()


@pytest.mark.fast("paper-portable")
@pytest.mark.parametrize(("name", "target"), combined(["paper", "modern", "untied"], ["portable", "cpu"]))
def test_a_copy_is_what_was_built(target, name):
    request = Request(config=encoder_decoder(name))
    chosen = TARGETS[target].for_model(request.config)
    for graph, build in chosen.builders["encoder-decoder"].items():
        alone, first, second = build(request).model(), chosen.build(graph, request), chosen.build(graph, request)
        assert contents(first) == contents(second) == contents(alone)
        assert marks(first) == marks(second) == marks(alone) != []


def test_the_rows_of_a_copy_are_of_its_own_parameters():
    request = Request(config=encoder_decoder("paper"))
    model = TARGETS["cpu"].build("classifier_rows_cpu", request)
    named = [value.meta[ROWS_OF] for value in built._values(model) if ROWS_OF in value.meta]
    assert named
    assert all(value is model.graph.initializers[str(value.name)] for value in named)


def test_a_change_of_one_copy_is_none_of_the_next():
    request = Request(config=encoder_decoder("paper"))
    model = TARGETS["cpu"].build(DECODER_CPU, request)
    before = contents(model)
    model.graph.node(0).op_type = "Other"
    model.graph.inputs[0].name = "other"
    next(iter(model.graph.initializers.values())).shape = ir.Shape([1])
    model.metadata_props["a"] = "b"
    assert contents(model) != before
    assert contents(TARGETS["cpu"].build(DECODER_CPU, request)) == before


def test_what_was_asked_for_last_is_kept(monkeypatch):
    monkeypatch.setattr(built, "KEPT", 12)
    asked: list[int] = []

    def made(number: int, nodes: int = 4) -> ir.Model:
        def build() -> ir.Model:
            asked.append(number)
            return ir.Model(ir.Graph([], [], nodes=[ir.node("X", []) for _ in range(nodes)]), ir_version=9)

        return built_once(number, build)

    for number in (0, 1, 2, 0, 3, 0, 1):
        assert len(made(number).graph) == 4
    assert asked == [0, 1, 2, 3, 1], "1 was the first that nobody had asked for again"
    for number in (4, 4, 5):
        made(number, 99)
    assert asked[5:] == [4, 5], "the last one stays, however large"


def test_requests_that_differ_in_anything_are_others():
    configs = [encoder_decoder("paper"), encoder_decoder("modern"), alone("paper", "encoder")]
    requests = [Request(config=config) for config in configs]
    requests += [Request(config=configs[0], attention_layer=0), Request(config=configs[0], inputs_embeds=True)]
    for request in requests:
        for graph in TARGETS["portable"].graph_names(request.config):
            TARGETS["portable"].build(graph, request)
    assert len(built._BUILT) == sum(len(TARGETS["portable"].graph_names(each.config)) for each in requests)
