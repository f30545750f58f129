"""Precisions that a model can be exported in: one table. `passes.py` makes each of them.

A precision's files have a suffix, by which transformers.js and Optimum find them: encoder_model_quantized.onnx. Ids and
masks stay int64, all other inputs and outputs float32: whoever runs one precision runs the others.

Nothing here imports onnx: `runtime/folder.py`, which runs models, needs the suffixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from mlx_transformer.system.errors import UserError

OPSET, IR_VERSION = 20, 9
BLOCKS_OPSET, BLOCKS_IR_VERSION = 21, 10
"""The least ones that have a scale for each block of a row."""
STANDARD, ONNXRUNTIME = "standard", "com.microsoft"
"""Sets of operators: those of ai.onnx alone, or ONNX Runtime's own too."""
UNPACKED = "unpacked"
"""In their place: weights that are made float32 when the graph is loaded."""


class Limits(NamedTuple):
    """The limits of the quality gate (`package/quality.py`).

    `agreement`: the least share of equal tokens. `bleu`, `exact`: the most points below float32 on 1000 sentences; on n
    sentences sqrt(1000 / n) times as many, for chance weighs more in a small sample.
    """

    agreement: float
    bleu: float
    exact: float


class Precision(NamedTuple):
    """One precision: how it is called, what its files hold and how far it may be off.

    `dtype`: the word of transformers.js for it. `label`: what it is, for people. `form`, `bits`: the kind of what is
    stored, by which `passes.py` chooses, and the bits of one value. `limits`: None if it is not judged, as nothing is
    rounded. `opset`, `ir_version`: what files with blocks in standard operators need.

    `depends_on_batch`: a sentence's neighbours can change its result. ONNX Runtime's kernels add up a product in an
    order that depends on how many rows there are; activations are rounded after it, and a last bit may tip that.
    `rounds_blocks`: it differs from `packed` only in whose integers they are, so what MLX has quantised would be
    rounded again.
    """

    suffix: str
    dtype: str
    label: str
    form: Literal["floats", "integers", "blocks", "packed"]
    bits: int
    limits: Limits | None = None
    depends_on_batch: bool = False
    rounds_blocks: bool = False
    opset: int = OPSET
    ir_version: int = IR_VERSION


class Lowering(NamedTuple):
    """How a target's runtime takes lower precisions: a fact of each row of `targets/table.py`.

    `operators`: the set that graphs, and int8's products, are made of. `blocks`: the set of the operator that reads
    integers in blocks, DequantizeLinear or MatMulNBits. `tables_in_blocks`: whether embeddings and classifier are in
    blocks too. `computes_in`: the precisions of sixteen bits that it computes in; others are stored so, and computed in
    float32.
    """

    operators: str = STANDARD
    blocks: str = STANDARD
    tables_in_blocks: bool = False
    computes_in: tuple[str, ...] = ("float16",)


# Sixteen bits: what rounding alone may do. int8, int4: BLEU's loss is what translations may suffer; a model whose best
# tokens differ more often than that has been damaged even where BLEU doesn't show it.
PRECISIONS: dict[str, Precision] = {
    "float32": Precision("", "fp32", "as trained", "floats", 32),
    "float16": Precision(
        "_fp16", "fp16", "weights and activations of sixteen bits", "floats", 16, Limits(0.99, 0.1, 0.5)
    ),
    "bfloat16": Precision(
        "_bf16",
        "",
        "the same with float32's range; transformers.js has no name for it",
        "floats",
        16,
        Limits(0.97, 0.3, 1.0),
    ),
    "int8": Precision(
        "_quantized",
        "q8",
        "signed weights with a scale an output, activations with fixed scales or with one a token",
        "integers",
        8,
        Limits(0.95, 0.3, 1.0),
    ),
    "int8-weights": Precision(
        "_int8",
        "int8",
        "weights of 8 bits in blocks",
        "blocks",
        8,
        Limits(0.95, 0.3, 1.0),
        rounds_blocks=True,
        opset=BLOCKS_OPSET,
        ir_version=BLOCKS_IR_VERSION,
    ),
    "int4": Precision(
        "_q4",
        "q4",
        "weights of 4 bits in blocks, embeddings of 8",
        "blocks",
        4,
        Limits(0.85, 0.5, 2.0),
        depends_on_batch=True,
        rounds_blocks=True,
        opset=BLOCKS_OPSET,
        ir_version=BLOCKS_IR_VERSION,
    ),
    "packed": Precision(
        "_packed",
        "fp32",
        "integers of a checkpoint quantised by MLX, in ONNX Runtime's operators",
        "packed",
        8,
        depends_on_batch=True,
    ),
}

IN_BLOCKS = tuple(name for name, entry in PRECISIONS.items() if entry.form in ("blocks", "packed"))
"""Precisions of weights in blocks, whose products leave a choice of what is done with the activations."""

ACTIVATIONS = {"int8": 4, "float32": 1}
"""The choice, and ONNX Runtime's number for it (MatMulNBits' accuracy_level): rounded to int8 in blocks, which is the
fastest and the default, as it is ONNX Runtime's own; or multiplied as they are."""
DEFAULT_ACTIVATIONS = "int8"


def check_precisions(names: str | Iterable[str]) -> list[str]:
    """Return the names, each once; `UserError` for one that isn't in the table."""
    chosen = list(dict.fromkeys([names] if isinstance(names, str) else names))
    unknown = [name for name in chosen if name not in PRECISIONS]
    if unknown or not chosen:
        problem = f"precision {unknown[0]!r} is unknown" if unknown else "no precision given"
        raise UserError(f"{problem}; choose from {', '.join(PRECISIONS)}")
    return chosen


def check_activations(name: str | None, precisions: Iterable[str]) -> str:
    """Return the name, or the default's; `UserError` for one that isn't in the table or that no precision heeds."""
    if name is None:
        return DEFAULT_ACTIVATIONS
    if name not in ACTIVATIONS:
        raise UserError(f"activations {name!r} are unknown; choose from {', '.join(ACTIVATIONS)}")
    if not set(precisions) & set(IN_BLOCKS):
        have = ", ".join(IN_BLOCKS)
        raise UserError(f"activations {name}: precision {', '.join(precisions)} has no choice; {have} have one")
    return name


def blocks_operators(precision: str, lowering: Lowering, activations: str) -> str:
    """Return what reads weights in blocks: `lowering`'s operators, but `UNPACKED` for 8 bits with float32 activations,
    as ONNX Runtime has no fast product for these two."""
    unpacked = PRECISIONS[precision].rounds_blocks and PRECISIONS[precision].bits == 8 and activations == "float32"
    return UNPACKED if unpacked else lowering.blocks


def arithmetic(
    precision: str, activations: str | None, float32: Sequence[str] = (), sums_in_16_bits: bool = False
) -> str:
    """Say in a few words what is multiplied. float32: the layers that int8 leaves so. sums_in_16_bits: the processor
    has no more for two products of bytes, and some need more."""
    label = PRECISIONS[precision].label if precision in IN_BLOCKS else precision
    label += f"; float32 in {', '.join(float32)}" if float32 else ""
    label += "; sums of two products held to 16 bits by this processor, and some need more" if sums_in_16_bits else ""
    return label if activations is None else f"{label}; {activations} activations"


def takes_rows(precision: str) -> bool:
    """Return whether some rows of the classifier can be taken alone: not of weights in blocks, nor of packed ones."""
    return PRECISIONS[precision].form in ("floats", "integers")
