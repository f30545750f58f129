"""One engine that makes vectors of texts, in a process of its own: `engines.vectors NAME PUBLISHED FOLDER THREADS`.

PUBLISHED: the folder that sentence-transformers reads. FOLDER: what is made of it for this engine, the first time. JSON
objects, one a line: it begins with {"ready": true}, then answers

    {"texts": [...], "batch": n}     with {"wall": s, "cpu": s}: so many at a time, one batch after the other
    {"texts": [...], "vectors": true} with {"vectors": [[...], ...]}

and ends with its input. Tokenizing and pooling count. A batch is padded to its longest text, in the engine's own way.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Embed = Callable[[Sequence[str]], Any]


def sentence_transformers(published: Path, folder: Path, threads: int) -> Embed:
    """PyTorch, eager, float32."""
    import torch  # type: ignore[import-not-found]
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(published), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=len(texts), show_progress_bar=False)


def optimum(published: Path, folder: Path, threads: int, quantised: bool = False) -> Embed:
    """Optimum's own export, or its dynamic quantisation for VNNI, in its class for ONNX Runtime."""
    import onnxruntime as ort
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found]
    from optimum.onnxruntime import ORTModelForFeatureExtraction  # type: ignore[import-not-found]

    if not (folder / "model.onnx").is_file():
        main_export(str(published), folder, task="feature-extraction", library_name="transformers", do_validation=False)
        if quantised:
            _quantise(folder)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    model = ORTModelForFeatureExtraction.from_pretrained(folder, session_options=options)
    tokenize = _tokenizer(published)

    def embed(texts: Sequence[str]) -> Any:
        given = tokenize(texts)
        return _pooled(model(**given).last_hidden_state, given["attention_mask"])

    return embed


def ctranslate2(published: Path, folder: Path, threads: int, kind: str = "float32") -> Embed:
    import ctranslate2 as ct2  # type: ignore[import-not-found]

    if not (folder / "model.bin").is_file():
        ct2.converters.TransformersConverter(str(published)).convert(str(folder), quantization=kind, force=True)
    encoder = ct2.Encoder(str(folder), compute_type=kind, intra_threads=threads, inter_threads=1)
    tokenize = _tokenizer(published, "np")

    def embed(texts: Sequence[str]) -> Any:
        mask = (given := tokenize(texts))["attention_mask"]
        rows = [row[:length].tolist() for row, length in zip(given["input_ids"], mask.sum(1), strict=True)]
        return _pooled(np.array(encoder.forward_batch(rows).last_hidden_state), mask)

    return embed


ENGINES: dict[str, Callable[[Path, Path, int], Embed]] = {
    "sentence-transformers:float32": sentence_transformers,
    "optimum:float32": optimum,
    "optimum:int8": lambda published, folder, threads: optimum(published, folder, threads, quantised=True),
    "ctranslate2:float32": ctranslate2,
    "ctranslate2:int8": lambda published, folder, threads: ctranslate2(published, folder, threads, "int8"),
}


def _quantise(folder: Path) -> None:
    from optimum.onnxruntime import ORTQuantizer  # type: ignore[import-not-found]
    from optimum.onnxruntime.configuration import AutoQuantizationConfig  # type: ignore[import-not-found]

    chosen = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
    ORTQuantizer.from_pretrained(folder, file_name="model.onnx").quantize(
        save_dir=folder / "quantised", quantization_config=chosen, file_suffix=""
    )
    shutil.move(folder / "quantised" / "model.onnx", folder / "model.onnx")


def _tokenizer(published: Path, kind: str = "pt") -> Callable[[Sequence[str]], Any]:
    from transformers import AutoTokenizer  # type: ignore[import-not-found]

    own = AutoTokenizer.from_pretrained(published)
    longest = json.loads((published / "sentence_bert_config.json").read_text())["max_seq_length"]
    own.model_max_length = longest
    return lambda texts: own(list(texts), padding=True, truncation=True, max_length=longest, return_tensors=kind)


def _pooled(memory: Any, mask: Any) -> Any:
    """The mean of a text's tokens, at length 1: of tensors as of arrays."""
    found = (memory * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]
    return found / ((found * found).sum(1) ** 0.5)[:, None]


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    name, published, folder, threads = sys.argv[1:]
    embed = ENGINES[name](Path(published), Path(folder), int(threads))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        texts = request["texts"]
        if request.get("vectors"):
            answer: dict[str, Any] = {"vectors": np.asarray(embed(texts)).tolist()}
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            for i in range(0, len(texts), request["batch"]):
                embed(texts[i : i + request["batch"]])
            answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
