"""The benchmark of vectors of texts: both engines give the same, and a ratio is that of the rounds."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
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
    rows = [line for line in lines if line.startswith("| float32")]
    assert [line.split(" | ")[1:3] for line in rows] == [[str(b), str(t)] for t in (1, 2) for b in (1, 8, 64)]
    assert lines[-3].startswith("Geometric mean of the ratios: ")
    assert lines[-1].startswith("Geometric mean of those to each round's fastest: ")
    assert json.loads((tmp_path / "out" / "cpu" / "embedding.json").read_text())["max_length"] == 20


def test_a_ratio_is_to_the_best_median_and_to_the_fastest_of_each_round() -> None:
    found = {"ours": [1.0, 2.0, 4.0], "plain": [3.0, 4.0, 8.0], "another": [9.0, 2.0, 6.0]}
    line = "| float32 | 8 | 2 | 50.0 | 25.0 | 16.7 | 2.00 | 1.50 |"
    assert benchmark.row("float32", 8, 2, 100, found) == (line, (2.0, 1.5))


def test_engines_take_turns_and_in_who_begins() -> None:
    calls: list[str] = []

    def engine(name: str) -> benchmark.Here:
        return benchmark.Here(lambda texts: [calls.append(f"{name}{len(texts)}"), np.zeros(1)][1])  # type: ignore[return-value]

    found = benchmark.measure({"ours": engine("a"), "plain": engine("b")}, ["x"] * 3, 2, 2, time.perf_counter)
    assert calls == ["a2", "b2", *["a2", "a1", "b2", "b1"], *["b2", "b1", "a2", "a1"]]
    assert [len(each) for each in found.values()] == [2, 2]


def test_a_clock_of_coarse_steps_is_read_until_it_has_moved() -> None:
    """Else a small model would take no time at all, and no speed could be told."""
    milliseconds = 0

    def engine(took: int) -> benchmark.Here:
        def embed(texts: Sequence[str]) -> NDArray:
            nonlocal milliseconds
            milliseconds += took
            return np.zeros(1)

        return benchmark.Here(embed)

    clock = lambda: milliseconds // 10 / 100  # noqa: E731
    found = benchmark.measure({"ours": engine(1), "plain": engine(2)}, ["x"] * 4, 4, 40, clock)
    assert all(taken > 0 for each in found.values() for taken in each)
    assert np.mean(found["plain"]) > 1.5 * np.mean(found["ours"])
    assert min(benchmark.row("float32", 4, 1, 4, found)[1]) > 1


PEER = """
import json, sys
print(json.dumps({"ready": sys.argv[3:]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"vectors": [[1]]} if "vectors" in asked else {"wall": 2.0, "cpu": asked["batch"]}), flush=True)
"""


def test_a_peer_is_asked_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "vectors.py").write_text(PEER)
    monkeypatch.setattr(benchmark, "__file__", str(tmp_path / "embed.py"))
    options = Namespace(peers=sys.executable, published=tmp_path, folder=tmp_path / "made")
    peer = benchmark.peer("ctranslate2:int8", 1, options)
    assert peer.vectors(["a"]).tolist() == [[1]]
    assert (peer.seconds(["a"], 4, time.perf_counter), peer.seconds(["a"], 4, time.process_time)) == (2.0, 4)
    peer.close()
    assert peer.process.returncode == 0


def test_in_the_browser_both_cut_texts_at_the_published_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Recorded:
        def __init__(self, *command: object) -> None:
            asked.append(command)

        def close(self) -> None:
            pass

    monkeypatch.setattr(benchmark, "Peer", Recorded)
    made, theirs = tmp_path / "optimum-int8", tmp_path / "transformers.js"
    made.mkdir()
    for name in ("config.json", "tokenizer.json", "model.onnx"):
        (made / name).write_text("{}")
    (made / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512, "do_lower_case": True}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    options = Namespace(peers="python", published=tmp_path, folder=tmp_path, browser=tmp_path)
    assert list(benchmark.in_browser("int8", 2, options)) == ["ours", "transformers.js"]
    settings = json.loads((theirs / "tokenizer_config.json").read_text())
    assert settings == {"model_max_length": 20, "do_lower_case": True}
    assert (theirs / "onnx" / "model_quantized.onnx").is_file()
    assert [command[2:] for command in asked[1:]] == [
        (way, folder, "q8", 2, tmp_path) for way, folder in (("output", tmp_path / "cpu"), ("pipeline", theirs))
    ]
