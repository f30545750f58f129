"""onnx's own ReferenceEvaluator as an engine: what the operators' specification says, in plain Python and NumPy.

It shares no kernel and no optimiser with ONNX Runtime, and it is slow: only small models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.external_data_helper import load_external_data_for_model
from onnx.reference import ReferenceEvaluator

from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system.errors import UserError

from .onnx_engine import OnnxEngine
from .protocol import Placement

Array = NDArray

# Parameters of the largest model that it takes (2 million: 4 s on two cores).
MOST_PARAMETERS = 20_000_000


@dataclass(frozen=True)
class Entry:
    """Name and shape of an input or an output; dynamic axes by their names."""

    name: str
    shape: list[int | str]


class DescribedSession:
    """A session that knows its inputs and outputs from the model."""

    def __init__(self, model: onnx.ModelProto):
        self.inputs, self.outputs = (
            [Entry(v.name, [axis.dim_param or axis.dim_value for axis in v.type.tensor_type.shape.dim]) for v in values]
            for values in (model.graph.input, model.graph.output)
        )

    def get_inputs(self) -> list[Entry]:
        return self.inputs

    def get_outputs(self) -> list[Entry]:
        return self.outputs


class EvaluatorSession(DescribedSession):
    """A `ReferenceEvaluator` with the methods of an ONNX Runtime session."""

    def __init__(self, model: onnx.ModelProto):
        super().__init__(model)
        self.evaluator = ReferenceEvaluator(model)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Array]) -> list[Any]:
        with np.errstate(all="ignore"):  # as any runtime
            return list(self.evaluator.run(output_names, dict(input_feed)))  # type: ignore[arg-type]


class EvaluatorEngine(OnnxEngine):
    name = "evaluator"
    device = "cpu"

    def __init__(self, checkpoint: Checkpoint, onnx_folder: Path):
        size = sum(int(np.prod(shape)) for shape in parameter_shapes(checkpoint.config).values())
        if size > MOST_PARAMETERS:
            raise UserError(
                f"evaluator: {size / 1e6:.1f} million parameters; onnx's ReferenceEvaluator is plain Python, "
                f"models above {MOST_PARAMETERS / 1e6:.0f} million take too long: leave it out"
            )
        super().__init__(checkpoint, onnx_folder)

    def open(self, path: Path, model: onnx.ModelProto | None = None) -> EvaluatorSession:
        if model is None:
            model = onnx.load(path)
        else:
            load_external_data_for_model(model, str(path.parent))
        return EvaluatorSession(model)

    def details(self) -> dict[str, str]:
        return {"onnx": onnx.__version__, "device": "cpu"}

    def placement(self) -> Placement:
        return Placement(self.name, self.device, "none", "NumPy's", {"onnx": onnx.__version__}, self.file_nodes())
