"""The benchmark of vectors of texts: both engines give the same, and a ratio is that of the rounds."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_models import SIZES, random_weights

from benchmarks import embed as benchmark
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.families.encoder_text import wordpiece


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", "##s", "."]
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    ends = {"pad_id": 0, "bos_id": 2, "eos_id": 3, "vocab_size": len(tokens)}
    config = TransformerConfig(**{**SIZES, "architecture": "encoder", "decoder_layers": 0, "token_types": 2, **ends})
    texts = TextEmbedding(normalize=True, max_length=20).texts()
    return save_checkpoint(tmp_path / "m", config, random_weights(config), wordpiece(tmp_path, {}), texts=texts)


def test_a_whole_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("one two.\n\nthree\n" + "one two threes " * 9 + "\n")
    given = [str(checkpoint), "--text", str(tmp_path / "text"), "--folder", str(tmp_path / "out"), "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["embed.py", *given, "--precision", "float32"])
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1:3] for line in lines[2:8]] == [[str(b), str(t)] for t in (1, 2) for b in (1, 8, 64)]
    assert lines[-1].startswith("Geometric mean of the ratios: ")
    assert json.loads((tmp_path / "out" / "cpu" / "embedding.json").read_text())["max_length"] == 20


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    found = {"ours": [1.0, 2.0, 4.0], "plain": [3.0, 2.0, 8.0]}
    assert benchmark.row("float32", 8, 2, 100, found) == ("| float32 | 8 | 2 | 50 | 33 | 2.00 |", 2.0)


def test_engines_take_turns() -> None:
    calls: list[str] = []

    def engine(name: str) -> benchmark.Engine:
        return lambda texts: [calls.append(f"{name}{len(texts)}"), np.zeros(1)][1]  # type: ignore[return-value]

    found = benchmark.measure({"ours": engine("a"), "plain": engine("b")}, ["x"] * 3, 2, 2, time.perf_counter)
    assert calls == ["a2", "b2", *["a2", "a1", "b2", "b1"] * 2]
    assert [len(each) for each in found.values()] == [2, 2]
