"""A published student exported in int8: its graphs compute with the integers and scales of its own file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from published import LINES, Published, limit, published

from export import OnnxTransformer, export_onnx
from mlx_transformer import Tokenizer
from mlx_transformer.convert import import_marian
from mlx_transformer.families.marian_files.items import INTGEMM8

pytestmark = pytest.mark.consumers


@pytest.fixture(scope="module")
def model() -> Published:
    return published()["enpt"]


@pytest.fixture(scope="module")
def imported(model: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("imported") / "student"
    import_marian(model.folder, out)
    return out


def matrices(folder: Path) -> list[np.ndarray]:
    """The integers of all graphs, as signed numbers."""
    kinds = (TensorProto.INT8, TensorProto.UINT8)
    graphs = [onnx.load(path).graph for path in sorted((folder / "onnx").glob("*.onnx"))]
    tensors = [numpy_helper.to_array(t) for graph in graphs for t in graph.initializer if t.data_type in kinds]
    return [t.astype(int) - (128 if t.dtype == np.uint8 else 0) for t in tensors if t.ndim == 2]


def holds(found: np.ndarray, integers: np.ndarray) -> bool:
    """Whether a matrix is this one, either way round, but for a row of zeros behind it."""
    return any(
        way.shape[1] == integers.shape[1]
        and len(way) in (len(integers), len(integers) + 1)
        and np.array_equal(way[: len(integers)], integers)
        and not way[len(integers) :].any()
        for way in (found, found.T)
    )


@pytest.mark.parametrize("target", ["cpu", "portable"])
def test_the_integers_are_the_files_and_the_tokens_those_of_exact_sums(
    model: Published, imported: Path, target: str, tmp_path: Path
) -> None:
    """But for roundings of activations that lie next to a half, which float32 decides otherwise than float64."""
    export_onnx(imported, tmp_path / "onnx", target=target, precision="int8")
    found = matrices(tmp_path / "onnx")
    items, _ = model.items()
    expected = {n: i.stored().astype(int) for n, i in items.items() if i.type == INTGEMM8 and i.count > 1}
    assert [name for name, q in expected.items() if not any(holds(each, q) for each in found)] == []
    assert len(expected) == 53
    sources = Tokenizer.load(imported).encode_batch(LINES)
    network = model.network("exact")
    written = OnnxTransformer(tmp_path / "onnx").generate(sources, max_new_tokens=max(map(limit, sources)))
    same = [
        network.translate(ids, limit(ids)) == ids_written for ids, ids_written in zip(sources, written, strict=True)
    ]
    assert sum(same) >= 0.9 * len(same)
