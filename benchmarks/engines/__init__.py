"""The engines that `translate.py` compares, each named by parts joined by colons.

    ours:TARGET:PRECISION[:CHOICE]
                                 this project's export of that target and precision, run by `export.OnnxTransformer`;
                                 CHOICE: `export --activations`, of int8 `--int8-scales`
    loop:TARGET:PRECISION[:CHOICE]
                                 its single file that holds the search too, run by `export.SearchModel`
    ct2:PRECISION[:LAYOUT]       CTranslate2; layout 1x2 (default), 2x1, 1x1, or 1x2-unbound
    torch:float32                PyTorch, eager: `generate` of transformers
    optimum:PRECISION            Optimum's export and its ORTModelForSeq2SeqLM; int8 by its ORTQuantizer for AVX2
    optimum-numpy:PRECISION      Optimum's files in a plain NumPy loop

A layout is translators x threads of each (`inter_threads` x `intra_threads`); two translators share out a batch by
halves. CTranslate2's threads are those of GNU OpenMP, which counts more of them than there are CPUs when all CPUs are
given to it, and then lets them sleep at every parallel region: up to seven times slower. So they are bound to cores and
told to wait actively, for a fraction of a millisecond; `1x2-unbound` is CTranslate2 as it comes.

Of those, `language.py` compares ours and ct2, whose layouts are 1x1 and 1x2, and

    ours:mlx:PRECISION           our checkpoint in MLX; `ours` may end with options of the search, e.g. :lookup=8
    genai:PRECISION              onnxruntime-genai, built by its own builder
    llama:TYPE                   llama.cpp, through node-llama-cpp, with a GGUF file of ours: F32, Q8_0, Q4_0
    mlx-lm:PRECISION             mlx-lm

An engine is a class with `__init__(folder, parts, threads)` and

    translate(rows, beam, length, limit, prefix=None) -> outputs

rows: source ids with eos, one batch. length: exactly that many tokens without eos, None to let the model end its
output within `limit`. prefix: the first tokens of each output, all rows the same number. outputs: ids without start
token and eos, a forced prefix included. Hypotheses are compared by log p / length where lengths differ.
Or, for decoders,

    continued(prompts, count, reached) -> outputs

prompts: ids, of one length. reached: called once the first new token of every row is known. outputs: `count` new ids of
each prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

Rows = list[list[int]]
BOUND = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "100000"}
OURS = ("ours", "loop")
CLASSES = {
    "ours": ("ours", "Folder"),
    "loop": ("loop", "Loop"),
    "ct2": ("ct2", "CTranslate2"),
    "torch": ("huggingface", "PyTorch"),
    "optimum": ("huggingface", "Optimum"),
    "optimum-numpy": ("numpy_loop", "NumPyLoop"),
    "genai": ("decoders", "Genai"),
    "mlx-lm": ("decoders", "MlxLm"),
    "llama": ("llama.mjs", ""),
}
DEFAULTS = (
    "ct2:float32 ct2:float32:2x1 ct2:int8 ct2:int8:2x1 torch:float32 optimum:float32 optimum:int8"
    " optimum-numpy:float32 ours:portable:float32 ours:cpu:float32 ours:cpu:int8"
    " loop:cpu:float32 loop:cpu:int8"
).split()


class Engine(Protocol):
    def __init__(self, folder: Path, parts: list[str], threads: int) -> None: ...

    def translate(self, rows: Rows, beam: int, length: int | None, limit: int, prefix: Rows | None = None) -> Rows: ...


@dataclass(frozen=True)
class EngineName:
    text: str
    parts: list[str]

    @property
    def family(self) -> str:
        return self.parts[0]

    @property
    def precision(self) -> str:
        return self.parts[2 if self.family in OURS else 1]

    @property
    def is_peer(self) -> bool:
        return self.family not in OURS

    @property
    def environment(self) -> dict[str, str]:
        return BOUND if self.family == "ct2" and layout(self.parts).endswith("2") else {}

    def folder(self, models: Path) -> Path:
        """Where `prepare.py` puts what this engine loads."""
        if self.family == "torch" or self.parts == ["mlx-lm", "float32"]:
            return models / "published"
        family = "optimum" if self.family == "optimum-numpy" else self.family
        return models / "-".join(
            [family, *(part for part in self.parts[1 : 4 if family in OURS else 2] if "=" not in part)]
        )


def layout(parts: list[str]) -> str:
    """The settings of CTranslate2."""
    return parts[2] if len(parts) > 2 else "1x2"


def parse(text: str) -> EngineName:
    """Raises ValueError for what is no name of one."""
    parts = text.split(":")
    needed = {"ours": (3, 5), "loop": (3, 4), "ct2": (2, 3)}.get(parts[0], (2, 2))
    if parts[0] not in CLASSES or not all(parts) or not needed[0] <= len(parts) <= needed[1]:
        raise ValueError(
            f"engine {text!r}: expected ours:TARGET:PRECISION[:CHOICE], loop:TARGET:PRECISION[:CHOICE],"
            f" or one of {', '.join(DEFAULTS)}"
        )
    if parts[0] == "ct2" and layout(parts) not in ("1x1", "1x2", "1x2-unbound", "2x1"):
        raise ValueError(f"engine {text!r}: the layout must be 1x1, 1x2, 1x2-unbound or 2x1")
    return EngineName(text, parts)


def engine_class(engine_name: EngineName) -> Any:
    """The class of an engine; imports what it needs."""
    module, name = CLASSES[engine_name.family]
    return getattr(import_module(f"engines.{module}"), name)
