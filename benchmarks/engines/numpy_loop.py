"""The files that Optimum writes, in the shortest loop that NumPy and onnxruntime allow. Forced lengths only.

Shapes: B sentences, K beams, S source tokens, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from . import Rows


class NumPyLoop:
    def __init__(self, folder: Path, parts: list[str], threads: int):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.encoder, self.first, self.further = (
            ort.InferenceSession(folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
            for name in ("encoder_model", "decoder_model", "decoder_with_past_model")
        )
        self.config = json.loads((folder / "config.json").read_text())

    def translate(self, rows: Rows, beam: int, length: int | None, limit: int, prefix: Rows | None = None) -> Rows:
        if length is None or prefix:
            raise NotImplementedError("this loop forces lengths and no tokens")
        longest, pad = max(map(len, rows)), self.config["pad_token_id"]
        ids = np.array([row + [pad] * (longest - len(row)) for row in rows], np.int64)  # (B, S)
        mask = np.array([[1] * len(row) + [0] * (longest - len(row)) for row in rows], np.int64)
        (hidden,) = self.encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        given = {"encoder_attention_mask": mask, "encoder_hidden_states": hidden}
        tokens = np.full((len(rows), 1), self.config["decoder_start_token_id"], np.int64)
        logits, caches = self.run(self.first, given | {"input_ids": tokens}, {})
        if beam == 1:
            chosen = []
            for step in range(length):
                if step:
                    logits, caches = self.run(self.further, given | {"input_ids": tokens}, caches)
                logits[:, -1, [self.config["eos_token_id"], pad]] = -np.inf
                tokens = logits[:, -1].argmax(-1)[:, None]
                chosen.append(tokens)
            return np.concatenate(chosen, 1).tolist()
        outputs = np.zeros((len(rows), beam, 0), np.int64)
        live = np.where(np.arange(beam), -np.inf, 0).astype(np.float32)[None].repeat(len(rows), 0)  # (B, K)
        logits = logits.repeat(beam, 0)
        given = {name: array.repeat(beam, 0) for name, array in given.items()}
        caches = {name: array.repeat(beam, 0) for name, array in caches.items()}
        base = np.arange(len(rows))[:, None] * beam
        for step in range(length):
            if step:
                logits, caches = self.run(self.further, given | {"input_ids": tokens}, caches)
            scores = logits[:, -1] - logits[:, -1].max(-1, keepdims=True)  # (B * K, V)
            scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
            scores[:, [self.config["eos_token_id"], pad]] = -np.inf
            scores = (live[..., None] + scores.reshape(len(rows), beam, -1)).reshape(len(rows), -1)
            best = np.argpartition(-scores, beam, -1)[:, :beam]
            live = np.take_along_axis(scores, best, -1)
            order = np.argsort(-live, -1, kind="stable")
            best, live = np.take_along_axis(best, order, -1), np.take_along_axis(live, order, -1)
            parents, words = np.divmod(best, logits.shape[-1])
            outputs = np.concatenate([np.take_along_axis(outputs, parents[..., None], 1), words[..., None]], 2)
            tokens, index = words.reshape(-1, 1), (base + parents).reshape(-1)
            caches = {name: array if ".encoder." in name else array[index] for name, array in caches.items()}
        return outputs[:, 0].tolist()

    def run(self, session: Any, inputs: dict[str, Any], caches: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Logits and the caches, of which a cached step returns those of the target alone."""
        wanted = {value.name for value in session.get_inputs()}
        found = session.run(None, {name: value for name, value in (inputs | caches).items() if name in wanted})
        names = [value.name.replace("present", "past_key_values") for value in session.get_outputs()]
        return found[0], caches | dict(zip(names[1:], found[1:], strict=True))
