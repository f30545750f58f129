"""`generate` of transformers: over PyTorch's eager model, and over Optimum's ONNX files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]

from . import Rows


class Generate:
    model: Any

    def translate(self, rows: Rows, beam: int, length: int | None, limit: int, prefix: Rows | None = None) -> Rows:
        config = self.model.config
        longest = max(map(len, rows))
        ids = torch.tensor([row + [config.pad_token_id] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        given = len(prefix[0]) if prefix else 0
        options: dict[str, Any] = {"num_beams": beam, "do_sample": False, "length_penalty": 1.0}
        options["max_new_tokens"] = (length or limit) - given
        if length:
            options["min_new_tokens"] = length - given
        if prefix and given:
            start = config.decoder_start_token_id
            options["decoder_input_ids"] = torch.tensor([[start, *row] for row in prefix])
        with torch.inference_mode():
            found = self.model.generate(input_ids=ids, attention_mask=mask, **options)
        ends = {config.pad_token_id, config.eos_token_id}
        return [[i for i in row[1:] if i not in ends] for row in found.tolist()]


class PyTorch(Generate):
    def __init__(self, folder: Path, parts: list[str], threads: int):
        from transformers import AutoModelForSeq2SeqLM  # type: ignore[import-not-found]

        torch.set_num_threads(threads)
        self.model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


class Optimum(Generate):
    def __init__(self, folder: Path, parts: list[str], threads: int):
        import onnxruntime as ort
        from optimum.onnxruntime import ORTModelForSeq2SeqLM  # type: ignore[import-not-found]

        torch.set_num_threads(threads)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self.model = ORTModelForSeq2SeqLM.from_pretrained(folder, session_options=options)
