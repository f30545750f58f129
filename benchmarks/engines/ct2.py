"""CTranslate2. Tokens of its vocabulary are the ids' decimal numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Its converters import both if they are there, which would be charged to its memory.
sys.modules["torch"] = sys.modules["transformers"] = None  # type: ignore[assignment]
import ctranslate2  # type: ignore[import-not-found]  # noqa: E402

from . import Rows, layout  # noqa: E402


class CTranslate2:
    def __init__(self, folder: Path, parts: list[str], threads: int):
        arrangement, config = layout(parts), json.loads((folder / "config.json").read_text())
        if "decoder_start_token" not in config:
            threads = 1 if arrangement == "1x1" else threads
            self.generator = ctranslate2.Generator(str(folder), compute_type=parts[1], intra_threads=threads)
            return
        self.translators = 2 if arrangement == "2x1" else 1
        self.model = ctranslate2.Translator(
            str(folder),
            compute_type=parts[1],
            inter_threads=self.translators,
            intra_threads=1 if arrangement == "1x1" else threads // self.translators,
        )
        self.eos = config["eos_token"]

    def translate(self, rows: Rows, beam: int, length: int | None, limit: int, prefix: Rows | None = None) -> Rows:
        options: dict[str, Any] = {"beam_size": beam, "max_decoding_length": length or limit, "length_penalty": 1.0}
        if length:
            options["min_decoding_length"] = length
        if prefix and prefix[0]:
            options["target_prefix"] = [[str(i) for i in row] for row in prefix]
        if self.translators > 1:
            options["max_batch_size"] = -(-len(rows) // self.translators)
        found = self.model.translate_batch([[str(i) for i in row] for row in rows], **options)
        return [[int(token) for token in result.hypotheses[0] if token != self.eos] for result in found]

    def continued(self, prompts: Rows, count: int, reached: Callable[[], None]) -> Rows:
        seen: set[int] = set()

        def told(step: Any) -> bool:
            if step.batch_id not in seen:
                seen.add(step.batch_id)
                if len(seen) == len(prompts):
                    reached()
            return False

        found = self.generator.generate_batch(
            [[str(i) for i in row] for row in prompts],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=told,
        )
        return [[int(token) for token in result.sequences[0]] for result in found]
