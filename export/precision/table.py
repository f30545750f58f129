"""The table of precisions that a model can be exported in; `passes.py` makes them.

Each precision's files have a suffix by which transformers.js and Optimum find them, e.g. encoder_model_quantized.onnx.
In every precision ids and masks are int64 and all other inputs and outputs float32, so the same code runs them all.

Nothing here imports onnx: `runtime/folder.py` reads the table too, and models run without onnx.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from mlx_transformer.system.errors import UserError

OPSET, IR_VERSION = 20, 9
BLOCKS_OPSET, BLOCKS_IR_VERSION = 21, 10
"""The first versions with a scale for each block of a row."""
STANDARD, ONNXRUNTIME = "standard", "com.microsoft"
"""Sets of operators: only ai.onnx, or ONNX Runtime's own too."""
UNPACKED = "unpacked"
"""A third choice for blocks: standard operators make the weights float32 when the graph is loaded."""


class Limits(NamedTuple):
    """The limits of the quality gate (`package/quality.py`), compared with float32.

    `agreement`: least share of equal tokens. `bleu`, `exact`: most points lost on 1000 sentences. On n sentences they
    are multiplied by sqrt(1000 / n), since chance weighs more in a small sample. `kl`: a decoder's largest mean
    divergence, in nats a token.
    """

    agreement: float
    bleu: float
    exact: float
    kl: float


class Precision(NamedTuple):
    """One precision: its names, how its weights are stored, and its limits.

    `suffix`: of file names. `dtype`: its name in transformers.js. `label`: a description for people. `form`, `bits`:
    how weights are stored, by which `passes.py` chooses the pass, and the bits of one weight. `limits`: None if
    nothing is rounded, so that there is nothing to judge. `opset`, `ir_version`: needed by files with blocks in
    standard operators.

    `depends_on_batch`: other sentences of a batch can change a sentence's result. The order in which ONNX Runtime sums
    a product depends on the number of rows. Activations are rounded afterwards, and a difference in the last bit can
    change the rounding.
    `rounds_blocks`: the weights are rounded in blocks, so a checkpoint that MLX has quantised would be rounded twice.
    `prompts`: the precision in which target cpu reads a decoder's prompts; "" for its own. Products of many tokens
    with weights in blocks of 4 bits take twice as long as with rows of 8 bits.
    """

    suffix: str
    dtype: str
    label: str
    form: Literal["floats", "integers", "blocks", "packed"]
    bits: int
    limits: Limits | None = None
    depends_on_batch: bool = False
    rounds_blocks: bool = False
    prompts: str = ""
    opset: int = OPSET
    ir_version: int = IR_VERSION


class Lowering(NamedTuple):
    """How a target's runtime handles lower precisions; `targets/table.py` has one for each target.

    `operators`: operators of graphs and of int8's products, `STANDARD` or `ONNXRUNTIME`. `blocks`: operators that read
    weights in blocks, DequantizeLinear (`STANDARD`) or MatMulNBits (`ONNXRUNTIME`). `tables_in_blocks`: embeddings and
    classifier are in blocks too. `computes_in`: 16-bit precisions that the runtime computes in; others are only stored
    in 16 bits and computed in float32.
    """

    operators: str = STANDARD
    blocks: str = STANDARD
    tables_in_blocks: bool = False
    computes_in: tuple[str, ...] = ("float16",)


# The limits of 16 bits allow for rounding only. For int8 and int4 the limit of BLEU is the loss of quality we accept; a
# model with less agreement than its limit is damaged, even if BLEU doesn't show it.
PRECISIONS: dict[str, Precision] = {
    "float32": Precision("", "fp32", "as trained", "floats", 32),
    "float16": Precision(
        "_fp16", "fp16", "weights and activations of sixteen bits", "floats", 16, Limits(0.99, 0.1, 0.5, 0.001)
    ),
    "bfloat16": Precision(
        "_bf16",
        "",
        "the same with float32's range; transformers.js has no name for it",
        "floats",
        16,
        Limits(0.97, 0.3, 1.0, 0.01),
    ),
    "int8": Precision(
        "_quantized",
        "q8",
        "signed weights with a scale an output, activations with fixed scales or with one a token",
        "integers",
        8,
        Limits(0.95, 0.3, 1.0, 0.1),
    ),
    "int8-weights": Precision(
        "_int8",
        "int8",
        "weights of 8 bits in blocks",
        "blocks",
        8,
        Limits(0.95, 0.3, 1.0, 0.05),
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
        Limits(0.85, 0.5, 2.0, 0.2),
        depends_on_batch=True,
        rounds_blocks=True,
        prompts="int8",
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
"""Precisions with weights in blocks. Their products leave a choice of activations (`ACTIVATIONS`)."""

ACTIVATIONS = {"int8": 4, "float32": 1}
"""Types of activations in products with weights in blocks, each with its accuracy_level in ONNX Runtime's MatMulNBits.
"int8": rounded in blocks, which is the fastest and ONNX Runtime's own default. "float32": not rounded."""
DEFAULT_ACTIVATIONS = "int8"


def check_precisions(names: str | Iterable[str]) -> list[str]:
    """The names without repetitions. Raises `UserError` for an unknown name, or if there are none."""
    chosen = list(dict.fromkeys([names] if isinstance(names, str) else names))
    unknown = [name for name in chosen if name not in PRECISIONS]
    if unknown or not chosen:
        problem = f"precision {unknown[0]!r} is unknown" if unknown else "no precision given"
        raise UserError(f"{problem}; choose from {', '.join(PRECISIONS)}")
    return chosen


def check_activations(name: str | None, precisions: Iterable[str]) -> str:
    """The name, by default "int8". Raises `UserError` if it is unknown, or none of the precisions has a choice."""
    if name is None:
        return DEFAULT_ACTIVATIONS
    if name not in ACTIVATIONS:
        raise UserError(f"activations {name!r} are unknown; choose from {', '.join(ACTIVATIONS)}")
    if not set(precisions) & set(IN_BLOCKS):
        have = ", ".join(IN_BLOCKS)
        raise UserError(f"activations {name}: precision {', '.join(precisions)} has no choice; {have} have one")
    return name


def blocks_operators(precision: str, lowering: Lowering, activations: str) -> str:
    """The operators that read weights in blocks: `lowering.blocks`, or `UNPACKED` for 8 bits with float32 activations,
    because ONNX Runtime has no fast product for this combination."""
    unpacked = PRECISIONS[precision].rounds_blocks and PRECISIONS[precision].bits == 8 and activations == "float32"
    return UNPACKED if unpacked else lowering.blocks


def arithmetic(
    precision: str, activations: str | None, float32: Sequence[str] = (), sums_in_16_bits: bool = False
) -> str:
    """The arithmetic of a precision in a few words, e.g. "int8; float32 in embedding".

    float32: layers that int8 leaves in float32. sums_in_16_bits: this processor limits the sum of two products of bytes
    to 16 bits, and some of the weights need more.
    """
    label = PRECISIONS[precision].label if precision in IN_BLOCKS else precision
    label += f"; float32 in {', '.join(float32)}" if float32 else ""
    label += "; sums of two products held to 16 bits by this processor, and some need more" if sums_in_16_bits else ""
    return label if activations is None else f"{label}; {activations} activations"


def takes_rows(precision: str) -> bool:
    """Whether a search can take chosen rows of the classifier: not from weights in blocks, nor from packed weights."""
    return PRECISIONS[precision].form in ("floats", "integers")


def prompts_in(precision: str, activations: str | None) -> str:
    """The precision of a decoder's own graph for prompts in target cpu; "" if its prompts need none."""
    return PRECISIONS[precision].prompts if activations == "int8" else ""
