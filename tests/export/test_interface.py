"""The tables of export/interface.py against the graphs: every input and output, its type and its axes, in its order."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir
import pytest
from combined import combined
from imports import ROOT
from small_models import configs, encoder_decoder
from upper_case import TOKENIZER

from export.interface import CROSS_ATTENTION, CROSS_DECODERS, GRAPHS, SEARCH, SETTINGS, Port, Request
from export.search.graph import search_model
from export.targets.table import TARGETS
from mlx_transformer.decoding.options import Options

DTYPES = {"FLOAT": "float32"}
NAMES = ("paper", "modern", "odd widths", "two vocabularies")
REQUESTS = {name: Request(config=config) for name, config in configs().items() if name.startswith(NAMES)}
PAPER = encoder_decoder("paper")
FULL = Request(config=PAPER, attention_layer=0)
"""With all that can be asked of graphs of ids."""
GRAPHS_OF_THEIR_OWN = ("portable", "cpu")


def ports_of(values: list[ir.Value]) -> list[tuple[str, str, tuple[str | int, ...]]]:
    """(name, type, axes) of a graph's inputs or outputs."""

    def axes(value: ir.Value) -> tuple[str | int, ...]:
        assert value.shape is not None
        return tuple(axis if isinstance(axis, int) else str(axis.value) for axis in value.shape)

    def dtype(value: ir.Value) -> str:
        assert value.dtype is not None
        return DTYPES.get(value.dtype.name, value.dtype.name.lower())

    return [(str(x.name), dtype(x), axes(x)) for x in values]


def declared(ports: tuple[Port, ...]) -> list[tuple[str, str, tuple[str | int, ...]]]:
    return [(port.name, port.dtype, port.axes) for port in ports]


def asked(request: Request) -> Iterator[Request]:
    """The request, plain and with each thing that can be asked of it."""
    config = request.config
    yield request
    if config.architecture == "encoder-decoder":
        yield replace(request, attention_layer=0)
    if config.has_encoder:
        yield replace(request, inputs_embeds=True)


@pytest.mark.parametrize(("name", "target"), combined(REQUESTS, GRAPHS_OF_THEIR_OWN))
def test_graphs_take_and_return_what_is_declared(name: str, target: str) -> None:
    for request in asked(REQUESTS[name]):
        for graph in TARGETS[target].graph_names(request.config):
            built = TARGETS[target].build(graph, request).graph
            ports = GRAPHS[graph](request)
            assert declared(ports.inputs) == ports_of(list(built.inputs)), graph
            assert declared(ports.outputs) == ports_of(list(built.outputs)), graph


@pytest.mark.parametrize(("target", "layer"), combined(["portable", "cpu"], [None, 1]))
def test_the_search_takes_and_returns_what_is_declared(target: str, layer: int | None) -> None:
    request = Request(config=encoder_decoder("modern"), attention_layer=layer)
    built, ports = search_model(request, target).graph, GRAPHS[SEARCH](request)
    assert declared(ports.inputs) == ports_of(list(built.inputs))
    assert declared(ports.outputs) == ports_of(list(built.outputs))


def test_a_search_of_text_takes_and_returns_what_is_declared() -> None:
    config = replace(encoder_decoder("paper"), vocab_size=TOKENIZER.vocab_size, source_vocab_size=None)
    request = Request(config=config, text=True)
    built, ports = search_model(request, "portable", TOKENIZER.to_json()).graph, GRAPHS[SEARCH](request)
    assert declared(ports.inputs) == ports_of(list(built.inputs))
    assert declared(ports.outputs) == ports_of(list(built.outputs))


def test_settings_are_those_of_the_host() -> None:
    options = Options()
    # 0: by the source's length; -1: the place in the batch; nothing forced; all ids; the model's own start
    own = {"max_new_tokens", "rows", "prefix", "candidates", "banned_sequences", "start_id"}
    assert {name: setting.default for name, setting in SETTINGS.items() if name not in own} == {
        name: getattr(options, name) for name in SETTINGS if name not in own
    }


@pytest.mark.parametrize("graph", GRAPHS)
def test_no_value_or_name_stands_for_two(graph: str) -> None:
    request = Request(config=encoder_decoder("paper"), attention_layer=0)
    for ports in (GRAPHS[graph](request).inputs, GRAPHS[graph](request).outputs):
        assert len({port.value for port in ports}) == len({port.name for port in ports}) == len(ports)


def test_what_a_folder_says_is_read_as_it_was_written() -> None:
    config = encoder_decoder("paper")
    for request in (
        Request(config=config),
        Request(config=config, attention_layer=1),
        Request(config=config, inputs_embeds=True),
    ):
        assert Request.read(request.written(), config) == request
    with pytest.raises(ValueError, match="no decoder layer 2"):
        Request.read(Request(config=config, attention_layer=2).written(), config)


def test_every_cross_decoder_can_return_attention() -> None:
    config = encoder_decoder("paper")
    request = Request(config=config, attention_layer=1)
    showing = [name for name, ports in GRAPHS.items() if "attention" in ports(request).output_names]
    assert showing == [*CROSS_DECODERS, SEARCH]


# `cross_attention` is also what the modules are called whose weights that output has.
NAMES_OF_GRAPHS = {
    port.name
    for graph in GRAPHS.values()
    for side in (graph(FULL).inputs, graph(FULL).outputs)
    for port in side
    if port.name not in (port.value, CROSS_ATTENTION)
}
CACHES = {name.partition("0")[0] for name in NAMES_OF_GRAPHS if ".0." in name}


def names_in(source: str) -> list[str]:
    """The strings of a Python file that are a graph's names, or begin as those of its caches; docstrings are none."""
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [x for x in strings if isinstance(x, str) and (x in NAMES_OF_GRAPHS or x.startswith((*CACHES,)))]


def test_nobody_else_knows_a_name() -> None:
    """Inputs and outputs are named in export/interface.py, those of a first stack in core/inputs.py; all others ask."""
    files = [*(ROOT / "export").rglob("*.py"), *(ROOT / "mlx_transformer" / "families").rglob("*.py")]
    found = {str(file.relative_to(ROOT)): names_in(file.read_text(encoding="utf-8")) for file in files}
    # Fields of what others' networks return, and what sentence-transformers' folders call them.
    of_others = {"export/validate/origin/hugging_face.py", "mlx_transformer/families/sentence_folder.py"}
    assert {file for file, names in found.items() if names} - of_others == {"export/interface.py"}
    words = re.compile(rf"\b({'|'.join(map(re.escape, NAMES_OF_GRAPHS))})\b")
    pages = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "export/web/page").glob("*.js")}
    assert {name: words.findall(text) for name, text in pages.items() if words.search(text)} == {}


def test_a_name_is_seen() -> None:
    assert {"input_ids", "encoder_hidden_states", "use_cache_branch", "past.0.key"} <= NAMES_OF_GRAPHS
    assert {"past_key_values.", "present.", "past."} == CACHES
    assert names_in("x = {'input_ids': 1}\ny = f'past_key_values.{i}.key'") == ["input_ids", "past_key_values."]
    assert names_in("'''of input_ids'''\nmask = 'source_mask'") == []
