"""A folder that mlx-lm reads, run by the package `mlx_lm` itself on the CPU in float64, its integers dequantised.

`mlx_lm` is no dependency: users of this comparison have it. It computes some models otherwise than transformers
(`families/mlx_lm.py`), which the report says.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from export.validate.cases import Case
from export.validate.engines.protocol import Unavailable
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.steps import banned_ids
from mlx_transformer.families.mlx_lm import unlike_mlx_lm
from mlx_transformer.system.errors import UserError, one_line

from . import Array, Origin


class MlxLm(Origin):
    """A model folder of mlx-lm. Raises Unavailable if mlx-lm is missing."""

    name = "mlx-lm"

    def __init__(self, folder: Path, config: TransformerConfig):
        if find_spec("mlx_lm") is None:
            raise Unavailable("--against mlx-lm: not installed here: pip install mlx-lm")
        self.folder, self.config = folder, config
        self.mx, utils = import_module("mlx.core"), import_module("mlx_lm.utils")
        self.make_cache = import_module("mlx_lm.models.cache").make_prompt_cache
        with self._on_cpu():
            try:
                self.model, self.values = utils.load_model(folder)
                np.array(self.model(self.mx.array([[config.bos_id]])).astype(self.mx.float32))
            except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
                raise UserError(f"{folder}: mlx-lm can't run it ({one_line(str(error))[:200]})") from error
            if "quantization" in self.values:
                self.model = utils.dequantize_model(self.model)
            self.model.set_dtype(self.mx.float64)

    def _on_cpu(self) -> Any:
        return self.mx.stream(self.mx.cpu)

    def described(self) -> str:
        versions = " ".join(f"{name} {version(name)}," for name in ("mlx-lm", "mlx"))
        unlike = "".join(f"; other than in transformers, {reason}" for reason in unlike_mlx_lm(self.values))
        return f"{versions} {self.values.get('model_type')} in float64, {self.folder}{unlike}"

    def fitted(self, case: Case) -> Case | None:
        return case if case.mask is None or bool(case.mask.all()) else None

    def outputs(self, case: Case) -> dict[str, Array]:
        with self._on_cpu():
            return {"logits": np.array(self.model(self.mx.array(case.ids)))}

    def search(self, sources: Sequence[list[int]], name: str, options: Options) -> list[list[int]]:
        """See `Origin`. Each prompt by itself, greedily, with mlx-lm's caches."""
        with self._on_cpu():
            return [self.ended(self._continued(source, options), options) for source in sources]

    def _continued(self, prompt: list[int], options: Options) -> list[int]:
        written, cache, read = list[int](), self.make_cache(self.model), prompt
        ends = {self.config.eos_id, *options.end_ids}
        while len(written) < (options.max_new_tokens or 0) and not ends & set(written):
            logits = np.array(self.model(self.mx.array([read]), cache=cache))[0, -1]
            logits[list(banned_ids(self.config))] = -np.inf
            read = [int(logits.argmax())]
            written += read
        return written
