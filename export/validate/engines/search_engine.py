"""A file with the search inside (`export --search`) as an engine: its weights, and the tokens and scores it returns.

No logits come out of it, and none is needed: how far one may be off, and so what is a tie, depends on the inputs and
the precision alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from export.graph.protos import metadata_of, read_model
from export.precision.table import DEFAULT_ACTIVATIONS, IN_BLOCKS
from export.runtime.sessions import session_options
from export.search.metadata import ACTIVATIONS, CONFIG, PRECISION, int8_scales_of
from export.search.runtime import SearchModel
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.generation.options import Hypothesis, Options
from mlx_transformer.system.errors import UserError

from .kernel import EXACT, integer_kernel
from .onnx_engine import OnnxFiles, check_same_model
from .onnxruntime_engine import WholeEngine, open_changed, provider_of
from .protocol import Capabilities


def is_search(path: Path) -> bool:
    """Return whether this file is one that `export_search` wrote."""
    try:
        return CONFIG in metadata_of(read_model(path))
    except UserError:
        return False


class SearchEngine(WholeEngine, OnnxFiles):
    """ONNX Runtime over one file."""

    compared = "weights, tokens, scores"

    def __init__(self, checkpoint: Checkpoint, path: Path, device: str = "cpu", threads: int | None = None):
        self.provider = provider_of(device)
        self.model = SearchModel(path, threads=threads, providers=[self.provider])
        self.model.shortlist = None  # what is compared chooses among all tokens
        if self.model.takes_text:
            raise UserError(f"{path}: takes text; what is compared are ids: validate it as exported without text")
        check_same_model(self.model, checkpoint)
        self.checkpoint, self.config, self.device, self.threads = checkpoint, self.model.config, device, threads
        metadata = self.model.session.get_modelmeta().custom_metadata_map
        self.precision = metadata.get(PRECISION, "float32")
        if self.precision in IN_BLOCKS:
            self.activations = metadata.get(ACTIVATIONS, DEFAULT_ACTIVATIONS)
        if (scales := int8_scales_of(metadata, self.config, path)) is not None:
            self.int8_scales = scales
        among = "candidates" in self.model.ports.input_names
        self.capabilities, self._round_trips = Capabilities(shows="tokens", files={"search": path}, among=among), {}

    @property
    def sums_in_16_bits(self) -> bool:
        return self.device == "cpu" and self.int8_scales.may_overflow and integer_kernel() != EXACT  # in its loop

    def open(self, path: Path, model: onnx.ModelProto | None = None) -> ort.InferenceSession:
        """Open a part of the file; the whole file is open already."""
        if model is None:
            return self.model.session
        options = session_options(self.threads, activations=self.activations)
        return open_changed(model, path, options, [self.provider])

    def _hypotheses(
        self, sources: Sequence[Any], options: Options, candidates: Sequence[Sequence[int]] | None
    ) -> list[list[Hypothesis]]:
        # Every option is given, so that none is taken from the file's own settings.
        if options.max_new_tokens is None and not options.max_length_factor and candidates is None:
            return self.model.without_limit(list(sources), options)
        return self.model.search(list(sources), candidates=candidates, **vars(options))
