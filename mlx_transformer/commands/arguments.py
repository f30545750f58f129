"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Backend(Enum):
    mlx = "mlx"
    onnx = "onnx"


class PenaltyForm(Enum):
    gnmt = "gnmt"
    length = "length"


class Overlong(Enum):
    error = "error"
    truncate = "truncate"
    split = "split"


Model = Annotated[Path, typer.Argument(help="A checkpoint folder (or a run's folder), or an ONNX folder.")]
Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint folder, or the folder of a training run.")]
Onnx = Annotated[Path, typer.Argument(help="A folder written by `export`.")]
Beam = Annotated[int, typer.Option(help="Hypotheses kept a sentence; 1 is greedy.")]
LengthPenalty = Annotated[float, typer.Option(help="Alpha of the length penalty; 0 compares bare probabilities.")]
FormOfPenalty = Annotated[
    PenaltyForm, typer.Option(help="Of n tokens: ((5+n)/6)^alpha (gnmt) or n^alpha (length), as in transformers.")
]
MinNew = Annotated[int, typer.Option(help="Fewest new tokens a sentence, its end token counted.")]
MaxNew = Annotated[int | None, typer.Option(help="Most new tokens a sentence.", show_default="source length + 50")]
EarlyStopping = Annotated[
    bool, typer.Option("--early-stopping", help="Stop a sentence once BEAM hypotheses are finished.")
]
OverlongOption = Annotated[Overlong, typer.Option(help="What to do with a line longer than the model takes.")]
BackendOption = Annotated[Backend | None, typer.Option(help="Runtime.", show_default="what MODEL is made for")]
Force = Annotated[bool, typer.Option("--force", help="Replace another model that OUT holds.")]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Skip comparing the files with the digests in their manifest.")
]
Threads = Annotated[
    int | None, typer.Option(help="Threads of one ONNX Runtime operator.", show_default="one for each core")
]
Precision = Annotated[
    str | None, typer.Option(help="Which of an ONNX folder's precisions.", show_default="float32, or the only one")
]
