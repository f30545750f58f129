"""The graphs of target `cpu` that compute logits of given ids alone, and searches among a shortlist's candidates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from random_models import write_model

from export.interface import LISTED_CPU
from export.validate import compare
from export.validate.checks.free_running import AMONG as SEARCHES
from export.validate.findings import AMONG
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.shortlist import Shortlist, shortlist_bytes

SIZE = 40
SIZES = dict(vocab_size=SIZE, d_model=16, heads=4, d_ff=24, encoder_layers=1, decoder_layers=2, max_positions=24)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    config = TransformerConfig(**SIZES, output_bias=True)
    return write_model(config, tmp_path_factory.mktemp("listed"), target="cpu")


@pytest.mark.fast("shortlist")
@pytest.mark.parametrize("listed", [False, True], ids=["half of all", "shortlist"])
def test_logits_and_searches_among_candidates(package: tuple[Path, Path], listed: bool, tmp_path: Path) -> None:
    checkpoint, exported = package
    lists = Shortlist(6, 1, np.arange(SIZE + 1, dtype=np.uint64), np.arange(SIZE, dtype=np.uint32)[::-1].copy())
    (tmp_path / "lex.bin").write_bytes(shortlist_bytes(lists))
    chosen = tmp_path / "lex.bin" if listed else "none"
    runtimes = ["mlx", "onnxruntime"] if listed else ["onnxruntime"]
    report = compare(checkpoint, exported, runtimes, seed=1, threads=1, longest=8, shortlist=chosen)
    assert report.equal, report.failures()
    assert [point.runtime.split()[0] for point in report.points if point.path == AMONG] == ["onnxruntime"]
    searched = [check.runtime for check in report.tokens if check.search.endswith(SEARCHES)]
    assert len(searched) == (4 if listed else 2)  # greedy and beam, MLX too where there is a shortlist


def test_a_wrong_epsilon_among_candidates_alone_is_found(package: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, exported = package
    file = next(exported.rglob(f"{LISTED_CPU}.onnx"))
    before = file.read_bytes()
    model = onnx.load(file, load_external_data=False)
    [*_, epsilon] = [a for node in model.graph.node for a in node.attribute if a.name == "epsilon"]
    epsilon.f *= 3
    try:
        file.write_bytes(model.SerializeToString())
        report = compare(checkpoint, exported, ["onnxruntime"], seed=1, threads=1, searches=False)
    finally:
        file.write_bytes(before)
    assert not report.equal
    assert any(LISTED_CPU in failure and "epsilon" in failure for failure in report.failures())
