"""The targets of a package: which graphs it holds, and how they are written.

Every target computes the same function from the same modules. They differ in the rows below and in nothing else; the
reason for each operator in which they differ is in README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from export.graph.builder import GraphBuilder
from export.graph.built import built_once
from export.interface import DECODER_MERGED, ENCODER, GRAPHS, Ports, Request
from export.precision.table import ONNXRUNTIME, PRECISIONS, Lowering
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.system.errors import UserError

from .coreml import graphs as coreml_graphs
from .coreml.rows import split_outputs
from .coreml.shape import FixedShape
from .cpu import graphs as cpu_graphs
from .portable import graphs

Builders = Mapping[str, Mapping[str, Callable[[Request], GraphBuilder]]]
"""By architecture, then by the graph's name."""


@dataclass(frozen=True)
class Target:
    """All facts about one target; they stand nowhere else.

    `builders`: its graphs, for each architecture that it has any for; for another, `otherwise` names the target whose
    graphs are written in their place. `file_per_graph`: each graph has a data file of its own; otherwise all share one.
    `fixed_shape`: extents are constants of the graphs. `search`: the one-file search can be made of its `lowering`'s
    operators. `vectors`: encoders can read vectors in place of ids. `by_token`: encoders alone have a row a token.
    `precisions`: those it takes. `provider`: the execution provider of ONNX Runtime that it is for, where the CPU's
    doesn't run all of them. `tags`: of a model card, libraries that load its folders besides ONNX Runtime.
    """

    name: str
    summary: str
    builders: Builders
    lowering: Lowering
    otherwise: str | None = None
    file_per_graph: bool = False
    fixed_shape: bool = False
    search: bool = False
    vectors: bool = True
    by_token: bool = False
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    provider: str | None = None
    tags: tuple[str, ...] = ()

    def supports(self, config: TransformerConfig) -> str | None:
        """Return None if it has graphs of its own for such a model; else the reason why not, in words."""
        if config.architecture in self.builders:
            return None
        names = " and ".join(self.builders)
        return (
            f"target {self.name} has graphs of its own for {names} alone, not for architecture={config.architecture!r}"
        )

    def for_model(self, config: TransformerConfig) -> Target:
        """Return the target whose graphs are written: itself, or the one in its place. `UserError` if there is none."""
        reason = self.supports(config)
        if reason is None:
            return self
        if self.otherwise is None:
            raise UserError(f"{reason}: choose another target")
        return TARGETS[self.otherwise].for_model(config)

    def graph_names(self, config: TransformerConfig) -> list[str]:
        return list(self.for_model(config).builders[config.architecture])

    def data_files(self, config: TransformerConfig) -> dict[str, list[str]]:
        """Return {name of a data file: graphs that use it}."""
        names = self.graph_names(config)
        return {name: [name] for name in names} if self.file_per_graph else {"model": names}

    def build(self, name: str, request: Request) -> ir.Model:
        """Build the graph of that name, its parameters named but not filled."""
        target = self.for_model(request.config)
        build = target.builders[request.config.architecture][name]
        return built_once((target.name, name, repr(request)), lambda: build(request).model())

    def ports(self, name: str, request: Request) -> Ports:
        """Return the inputs and outputs of that graph as its file has them, where fixed shapes split long outputs."""
        ports = GRAPHS[name](request)
        return ports._replace(outputs=tuple(split_outputs(ports.outputs))) if self.fixed_shape else ports

    def shape_of(self, text: str | None, config: TransformerConfig) -> FixedShape | None:
        """Return the fixed shape in `text`. `UserError` if a target of fixed shape gets none, or another target gets
        one."""
        if not self.fixed_shape:
            if text is not None:
                takes = " or ".join(name for name, target in TARGETS.items() if target.fixed_shape)
                raise UserError(f"fixed shape {text!r}: target {self.name} has dynamic shapes; only {takes} takes one")
            return None
        if text is None:
            raise UserError(f"target {self.name} needs a fixed shape: {FixedShape.expected(config)}")
        return FixedShape.parse(text, config)

    def embedding_of(self, config: TransformerConfig, embedding: TextEmbedding | None) -> TextEmbedding | None:
        """Return what its graphs make of an encoder's output; None where whoever runs them does: see
        `sentence_embedding.py`. A graph doesn't know which tokens are a prompt's, where those aren't pooled."""
        if embedding is None or config.has_decoder or not embedding.prompt_counts:
            return None
        return None if self.fixed_shape and "max" in embedding.pooling else embedding.arithmetic

    def check_vectors(self, config: TransformerConfig) -> None:
        """Raise `UserError` unless an encoder of this target can read vectors in place of ids."""
        if not config.has_encoder:
            raise UserError("inputs_embeds: a decoder alone goes on from ids; an encoder takes vectors in their place")
        if not self.vectors:
            raise UserError(f"inputs_embeds: target {self.name} has encoders of ids alone; choose another target")

    def check_precisions(self, names: Iterable[str]) -> None:
        """Raise `UserError` for one that the target doesn't take."""
        for name in names:
            if name not in self.precisions:
                supported = " and ".join(self.precisions)
                raise UserError(f"precision {name}: target {self.name} takes {supported} alone; choose another target")


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
        Target(
            "coreml",
            "CoreML's execution provider: fixed shapes, and the arithmetic is its own choice",
            coreml_graphs.BUILDERS,
            Lowering(),
            fixed_shape=True,
            vectors=False,
            precisions=("float32",),
        ),
    )
}


def target_of(name: str) -> Target:
    """Return the target of that name; `UserError` with the known names if there is none."""
    if name not in TARGETS:
        raise UserError(f"target {name!r}: choose one of {', '.join(TARGETS)}")
    return TARGETS[name]
