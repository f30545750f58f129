"""What a package is made for: which graphs it holds, and the operator choices in them, each with its reason.

Every target computes the same function from the same modules. They differ in the rows below and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError

from . import graphs, rows_graphs

Builders = Mapping[str, Callable[[TransformerConfig], graphs.Graph]]


@dataclass(frozen=True)
class Choice:
    """One operator choice: what is used, in whose place, and the measurement or fact that speaks for it."""

    used: str
    instead_of: str
    why: str


@dataclass(frozen=True)
class Target:
    """`encoder_decoder`: its graphs' builders by name; other architectures have the one graph `model` everywhere."""

    name: str
    summary: str
    encoder_decoder: Builders
    choices: tuple[Choice, ...] = ()

    def graph_names(self, config: TransformerConfig) -> list[str]:
        return list(self._builders(config))

    def build(self, config: TransformerConfig, name: str) -> ir.Model:
        """The graph of that name, its parameters named but not filled."""
        return self._builders(config)[name](config).model()

    def _builders(self, config: TransformerConfig) -> Builders:
        if config.architecture == "encoder-decoder":
            return self.encoder_decoder
        return dict.fromkeys(graphs.graph_names(config), graphs.BUILDERS[config.architecture])


_PORTABLE = {name: graphs.BUILDERS[name] for name in graphs.ENCODER_DECODER}

# Microseconds and ratios: ONNX Runtime 1.31.1, CPU provider, 2 threads of an AMD EPYC without AVX-512, model base.
_CPU = (
    Choice(
        "DecoderMaskedMultiHeadAttention, one buffer as past and present",
        "Concat and attention in five operators",
        "a step copies one position instead of the whole past: attention over 256 positions takes half as long",
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
        "rows of tokens, padding taken out",
        "padded batches",
        "a product of 8 to 30 tokens a sentence has a third fewer rows; only attention sees padding",
    ),
    Choice(
        "Gemm with the residual or bias as C",
        "MatMul, Add",
        "one pass less over the activations; the weight is packed from the file as it is, not transposed first",
    ),
    Choice(
        "ArgMax, LogSoftmax and TopK in the graph",
        "logits handed to the host",
        "NumPy needs 5 ms for what the graph does in 0.7 ms (128 rows of 8000 logits)",
    ),
    Choice(
        "Add, LayerNormalization",
        "SkipLayerNormalization",
        "the fused operator is 3 to 5 times slower on CPU; the runner turns the optimiser's fusion off",
    ),
)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("portable", "standard operators, for any runtime; loads in Optimum and transformers.js", _PORTABLE),
        Target(
            "cpu", "ONNX Runtime on CPU, as fast as it gets; run by export.OnnxTransformer", rows_graphs.BUILDERS, _CPU
        ),
    )
}


def target_of(name: str) -> Target:
    """`UserError` names the targets there are."""
    if name not in TARGETS:
        raise UserError(f"target {name!r}: choose one of {', '.join(TARGETS)}")
    return TARGETS[name]
