"""The table of targets: the graphs of a package and how they are written.

Every target computes the same function from the same modules. All differences are in the rows below; README.md gives
the reason for each operator in which they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from export.graph.builder import GraphBuilder
from export.graph.built import built_once
from export.interface import DECODER_MERGED, ENCODER, Request
from export.precision.table import ONNXRUNTIME, Lowering
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

from .cpu import graphs as cpu_graphs
from .cpu.decoder import lacks
from .portable import graphs

Builders = Mapping[str, Mapping[str, Callable[[Request], GraphBuilder]]]
"""{architecture: {graph's name: its builder}}"""


@dataclass(frozen=True)
class Target:
    """All facts about a target.

    `builders`: its graphs by architecture. `lacks`: the kind of model it has no graphs for, if a model is of one; then
    those of the target `otherwise` are written. `file_per_graph`: each graph has its own data file; otherwise all share
    one. `search`: the one-file search can be made with this target's operators. `by_token`: graphs of encoder-only
    models compute a row per token. `provider`: ONNX Runtime's execution provider for it, if the CPU's doesn't run all
    its precisions. `tags`: for the model card, libraries other than ONNX Runtime that load its folders, e.g.
    "transformers.js".
    """

    name: str
    summary: str
    builders: Builders
    lowering: Lowering
    otherwise: str | None = None
    lacks: Callable[[TransformerConfig], str | None] = lambda config: None
    file_per_graph: bool = False
    search: bool = False
    by_token: bool = False
    provider: str | None = None
    tags: tuple[str, ...] = ()

    def supports(self, config: TransformerConfig) -> str | None:
        """None if the target has graphs for such a model; else the reason why not, for a message."""
        reason = self.lacks(config)
        return None if reason is None else f"target {self.name} has no graphs of its own for {reason}"

    def for_model(self, config: TransformerConfig) -> Target:
        """The target whose graphs are written for such a model: itself, or `otherwise`. `UserError` if neither can."""
        reason = self.supports(config)
        if reason is None:
            return self
        if self.otherwise is None:
            raise UserError(f"{reason}: choose another target")
        return TARGETS[self.otherwise].for_model(config)

    def graph_names(self, config: TransformerConfig) -> list[str]:
        return list(self.for_model(config).builders[config.architecture])

    def data_files(self, config: TransformerConfig) -> dict[str, list[str]]:
        """{name of a data file: graphs that use it}."""
        names = self.graph_names(config)
        return {name: [name] for name in names} if self.file_per_graph else {"model": names}

    def build(self, name: str, request: Request) -> ir.Model:
        """Build the graph `name`, with parameters named but not filled."""
        target = self.for_model(request.config)
        build = target.builders[request.config.architecture][name]
        return built_once((target.name, name, repr(request)), lambda: build(request).model())


_PORTABLE = graphs.BUILDERS
_BROWSER = {name: _PORTABLE["encoder-decoder"][name] for name in (ENCODER, DECODER_MERGED)}

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "portable",
            "standard operators, for any runtime; loads in Optimum and transformers.js",
            _PORTABLE,
            Lowering(),
            search=True,
            tags=("transformers.js",),
        ),
        Target(
            "cpu",
            "ONNX Runtime on CPU, as fast as it gets; run by export.OnnxTransformer",
            cpu_graphs.BUILDERS,
            Lowering(ONNXRUNTIME, ONNXRUNTIME, computes_in=()),
            otherwise="portable",
            lacks=lacks,
            search=True,
            by_token=True,
        ),
        Target(
            "web",
            "onnxruntime-web and transformers.js in a browser, on wasm or WebGPU",
            {**_PORTABLE, "encoder-decoder": _BROWSER},
            Lowering(blocks=ONNXRUNTIME, tables_in_blocks=True),
            file_per_graph=True,
            tags=("transformers.js",),
        ),
        Target(
            "cuda",
            "ONNX Runtime on an NVIDIA GPU",
            _PORTABLE,
            Lowering(computes_in=("float16", "bfloat16")),
            provider="CUDAExecutionProvider",
        ),
    )
}


def target_of(name: str) -> Target:
    """The target `name`, e.g. "cpu"; `UserError` if it is unknown."""
    if name not in TARGETS:
        raise UserError(f"target {name!r}: choose one of {', '.join(TARGETS)}")
    return TARGETS[name]
