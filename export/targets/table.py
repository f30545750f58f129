"""What a package is made for: which graphs it holds, and the operator choices in them, each with its reason.

Every target computes the same function from the same modules. They differ in the rows below and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from export.graph.builder import GraphBuilder
from export.interface import DECODER_MERGED, ENCODER, Request
from export.precision.table import ONNXRUNTIME, PRECISIONS, Lowering
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

from .coreml import graphs as coreml_graphs
from .coreml.shape import FixedShape
from .cpu import graphs as cpu_graphs
from .portable import graphs

Builders = Mapping[str, Mapping[str, Callable[[Request], GraphBuilder]]]
"""By architecture, then by the graph's name."""


@dataclass(frozen=True)
class Choice:
    """One operator choice: what is used, in whose place, and the measurement or fact that speaks for it."""

    used: str
    instead_of: str
    why: str


@dataclass(frozen=True)
class Target:
    """All facts about one target; they stand nowhere else.

    `builders`: its graphs, for each architecture that it has any for; for another, `otherwise` names the target whose
    graphs are written in their place. `file_per_graph`: each graph has a data file of its own; otherwise all share one.
    `fixed_shape`: extents are constants of the graphs. `search`: the one-file search can be made of its `lowering`'s
    operators. `vectors`: encoders can read vectors in place of ids. `precisions`: those it takes.
    """

    name: str
    summary: str
    builders: Builders
    lowering: Lowering
    choices: tuple[Choice, ...] = ()
    otherwise: str | None = None
    file_per_graph: bool = False
    fixed_shape: bool = False
    search: bool = False
    vectors: bool = True
    precisions: tuple[str, ...] = tuple(PRECISIONS)

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
        return self.for_model(request.config).builders[request.config.architecture][name](request).model()

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

# ONNX Runtime 1.31.1, CPU provider; where nothing else is said 2 threads of an AMD EPYC without AVX-512.
_CPU = (
    Choice(
        "DecoderMaskedMultiHeadAttention, one buffer as past and present",
        "Concat and attention in five operators",
        "a step copies one position instead of the whole past: 442 instead of 1006 us for attention over 256 positions"
        " (8 rows, 8 heads, one thread of an Intel server)",
    ),
    Choice(
        "its cache_indirection",
        "Gather of the caches by beam",
        "a beam reads its parents' positions where they are: nothing of the cache is moved between steps",
    ),
    Choice(
        "MultiHeadAttention with the beams as queries of one sentence",
        "keys and values of the source repeated for each beam",
        "they are read once a sentence",
    ),
    Choice(
        "keys of the source divided by sqrt(d_k) in the encoder's graph",
        "the operator's scale",
        "ONNX Runtime has a kernel for one query that scales nothing: 126 instead of 181 us for 32 sentences of 30"
        " tokens (8 heads of 64, AVX-512); greedy search is 1.04 to 1.2 times as fast for 8 and 32 sentences in int8",
    ),
    Choice(
        "rows of tokens, padding taken out",
        "padded batches",
        "a product of 8 to 30 tokens a sentence has a third fewer rows; only attention sees padding",
    ),
    Choice(
        "in the encoder FusedMatMul, Softmax, MatMul over tokens gathered by head",
        "MultiHeadAttention over padded sources",
        "padding and transposition are one Gather: 0.40 instead of 0.83 ms for 32 sources of 30 tokens (8 heads of 64,"
        " AVX-512); the encoder is 1.10 to 1.19 times as fast for 32 sources, 0.97 to 1.04 for one",
    ),
    Choice(
        "Gemm with the residual or bias as C",
        "MatMul, Add",
        "one pass less over the activations; the weight is packed from the file as it is, not transposed first",
    ),
    Choice(
        "ArgMax, LogSoftmax and TopK in the graph",
        "logits handed to the host",
        "NumPy needs 4 ms for what the graph does in 0.75 ms (128 rows of 8000 logits)",
    ),
    Choice(
        "Add, LayerNormalization",
        "SkipLayerNormalization",
        "the fused operator is 1.4 to 4.7 times slower (1 to 128 rows of 256 and 512); the runner turns the optimiser's"
        " fusion off",
    ),
)

# onnxruntime-web 1.31.0-dev.20260914-8d85527a0 in Chromium 156; its list of WebGPU kernels is docs/webgpu-operators.md.
_WEB = (
    Choice(
        "encoder_model and decoder_model_merged, a data file each",
        "four graphs and one data file",
        "transformers.js fetches these two, each with the data file of its name, and nothing else",
    ),
    Choice(
        "standard operators",
        "com.microsoft attention, cpu's shared buffers",
        "WebGPU has no DecoderMaskedMultiHeadAttention, and a MultiHeadAttention without mask and past; of these graphs"
        " it runs 54 of 58 and 123 of 135 nodes, all but positions and the causal mask, which wasm computes in int64",
    ),
    Choice(
        "float32, float16 or 4 bits on WebGPU; 8 bits on wasm",
        "one precision for both",
        "WebGPU has no MatMulInteger and no QuantizeLinear: 8 bits would go back to wasm at every product",
    ),
)

# Not run on a GPU: nothing here is a measurement.
_CUDA = (
    Choice(
        "standard operators",
        "com.microsoft attention, cpu's shared buffers",
        "no fused operator is used until one has been measured on a GPU; ONNX Runtime's optimiser fuses by itself",
    ),
    Choice(
        "float16 or bfloat16, activations too (give --precision float16)",
        "bfloat16 as a way to store weights alone, as in the other targets",
        "tensor cores multiply sixteen bits, and half the bytes are read; bfloat16 kernels are CUDA's alone",
    ),
)

# By onnxruntime's list of what CoreML takes (coreml/graphs.py); not run on a Mac.
_COREML = (
    Choice(
        "fixed extents, no operator on shapes",
        "dynamic axes",
        "CoreML's provider leaves dynamic shapes and what computes them to the CPU and splits the graph there",
    ),
    Choice(
        "buffers written by multiplication with a place's indicator",
        "Concat, ScatterND, TensorScatter",
        "of these CoreML takes only Concat, whose result has another extent at every step",
    ),
    Choice(
        "masks from Sub, Mul and Clip",
        "LessOrEqual, And, Where",
        "CoreML takes no LessOrEqual, and the others only since microsoft/onnxruntime#28597 (2026)",
    ),
    Choice(
        "Gather",
        "GatherND",
        "Core ML's gather_nd reads row 0 where indices aren't constants, so the provider leaves such a node to the CPU"
        " (microsoft/onnxruntime#28598)",
    ),
    Choice(
        "tables and classifiers of more than 16,384 rows in parts, each with an output of its own",
        "one Gather and one MatMul",
        "longer tensors are left to the CPU, or computed as nobody has written down (coreml/rows.py)",
    ),
    Choice("-3e4 on masked scores", "-1e9", "finite in float16, in which CoreML may compute; softmax makes both 0"),
    Choice(
        "keys and values of the source from the encoder", "from the decoder's first step", "no If, and no third graph"
    ),
)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "portable",
            "standard operators, for any runtime; loads in Optimum and transformers.js",
            _PORTABLE,
            Lowering(),
            search=True,
        ),
        Target(
            "cpu",
            "ONNX Runtime on CPU, as fast as it gets; run by export.OnnxTransformer",
            {"encoder-decoder": cpu_graphs.BUILDERS},
            Lowering(ONNXRUNTIME, ONNXRUNTIME, computes_in=()),
            _CPU,
            otherwise="portable",
            search=True,
        ),
        Target(
            "web",
            "onnxruntime-web and transformers.js in a browser, on wasm or WebGPU",
            {**_PORTABLE, "encoder-decoder": _BROWSER},
            Lowering(blocks=ONNXRUNTIME, tables_in_blocks=True),
            _WEB,
            file_per_graph=True,
        ),
        Target(
            "cuda",
            "ONNX Runtime on an NVIDIA GPU, meant for float16; not yet run on one",
            _PORTABLE,
            Lowering(computes_in=("float16", "bfloat16")),
            _CUDA,
        ),
        Target(
            "coreml",
            "CoreML's execution provider: fixed shapes, and the arithmetic is its own choice",
            coreml_graphs.BUILDERS,
            Lowering(),
            _COREML,
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
