"""A search graph in ONNX Runtime: ids or text in, the n best out, with the arguments of every other runtime here.

Shapes: B sentences, S source, n = n_best, T longest output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from mlx_transformer.generation.options import Hypothesis, Ids, Options, check_ids, length_limits
from mlx_transformer.generation.search import batches
from mlx_transformer.generation.steps import DEAD
from mlx_transformer.spec.config import TransformerConfig
from mlx_transformer.spec.errors import UserError

from ..sessions import padded
from .options import CONFIG, DEFAULTS


class SearchModel:
    """One file written by `export_search`.

        model = SearchModel("model.onnx")
        model.generate([[17, 5, 2]], beam=4)                  # [[ids]]
        model.search([[17, 5, 2]], beam=4, n_best=2)          # [[Hypothesis(ids, score), ...]]

    Raises `UserError` for a file that isn't one, and for the arguments as `generation.search.search` does.
    """

    def __init__(self, path: str | Path, *, threads: int | None = None, providers: Sequence[str] | None = None):
        """threads: of one operator, default the machine's cores. providers: ONNX Runtime's, default the CPU."""
        self.path = Path(path)
        options = ort.SessionOptions()
        options.log_severity_level = 3  # a warning for each input that has a default
        options.intra_op_num_threads = threads or 0
        options.add_session_config_entry("session.force_spinning_stop", "1")  # threads of other sessions need the cores
        try:
            self.session = ort.InferenceSession(path, options, providers=list(providers or ["CPUExecutionProvider"]), disabled_optimizers=["SkipLayerNormFusion"])
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise UserError(f"{path}: ONNX Runtime can't open it ({str(error).splitlines()[0]})") from None
        metadata = self.session.get_modelmeta().custom_metadata_map
        if CONFIG not in metadata:
            raise UserError(f"{path}: is no search graph of ours: write one with export_search")
        self.config = TransformerConfig.from_dict(json.loads(metadata[CONFIG]))

    def generate(self, ids: Ids, **options: Any) -> list[list[int]]:
        """New token ids of each input's best output."""
        return [found[0].ids for found in self.search(ids, **options)]

    def search(self, ids: Ids, **options: Any) -> list[list[Hypothesis]]:
        """The `n_best` best outputs of each input, best first. options: the fields of `Options`."""
        chosen = Options(**options)
        if chosen.beam > self.config.vocab_size:
            raise UserError(f"beam={chosen.beam} is more than the vocabulary's {self.config.vocab_size} tokens")
        rows = check_ids(ids, self.config.source_vocab_size)
        limits = length_limits(rows, [np.zeros(0, np.int64)] * len(rows), chosen, self.config, hard=True)
        found: list[list[Hypothesis]] = [[] for _ in rows]
        for index in batches(np.array([len(row) for row in rows], int), limits, chosen):
            hypotheses = self._run([rows[i] for i in index], limits[index], chosen)
            for i, best in zip(index, hypotheses, strict=True):
                found[i] = best
        for i, best in enumerate(found):
            if not best or not np.isfinite(best[0].score):
                raise UserError(f"source row {i}: the model's logits are not finite; check its weights")
        return found

    def _run(self, rows: list[np.ndarray], limits: np.ndarray, options: Options) -> list[list[Hypothesis]]:
        ids, mask = padded(rows, self.config.pad_id)
        feeds = {"input_ids": ids, "attention_mask": mask, **feeds_of(options), "max_new_tokens": limits}
        sequences, lengths, scores = self.session.run(["sequences", "lengths", "scores"], feeds)
        return [
            [
                Hypothesis(row[:length].tolist(), float(score))
                for row, length, score in zip(*sentence, strict=True)
                if not score <= DEAD  # not a number stays in, to be reported
            ]
            for sentence in zip(sequences, lengths, scores, strict=True)
        ]


def feeds_of(options: Options) -> dict[str, np.ndarray]:
    """The settings as the graph's inputs, but for the length limit."""
    return {name: np.asarray(getattr(options, name), x.dtype) for name, x in DEFAULTS.items() if x.ndim == 0}
