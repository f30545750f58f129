"""A published student exported in int8: its graphs compute with the integers and scales of its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from published import LINES, Published, limit, published

from export import OnnxTransformer, export_onnx, export_search
from export.targets.portable.runtime import SOURCE_MULTIPLE
from export.validate.engines import open_engine
from export.validate.engines.graph_runtimes import WasmSession
from export.validate.engines.onnxruntime_engine import EXACT, integer_kernel
from export.validate.engines.web_host import NodeHost
from export.validate.origin.check import certified_flip
from mlx_transformer import Tokenizer
from mlx_transformer.convert import import_marian
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.decoding.options import Options
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


def test_one_file_in_the_browsers_build_writes_the_processors_tokens_or_certified_ones(
    model: Published, imported: Path, tmp_path: Path
) -> None:
    """Its kernels add in other orders: an activation next to a half falls to the other side now and then. Then the
    integers of both, shown along what each wrote, are the reference's but for such ones, and lead to its tokens."""
    lowered = {"target": "portable", "precision": "int8", "accept_loss": True}
    file = export_search(imported, tmp_path / "one.onnx", **lowered)
    checkpoint, stored = open_checkpoint(imported), dict(open_checkpoint(imported).tensors())
    sources = Tokenizer.load(imported).encode_batch(LINES)
    folder = export_onnx(imported, tmp_path / "folder", **lowered)
    options = Options(max_new_tokens=max(map(limit, sources)))
    host = NodeHost(1)
    sessions: dict[str, Any] = {"wasm": WasmSession(host, onnx.load(file), file, tmp_path)}
    found: dict[str, list[list[int]]] = {}
    if integer_kernel() == EXACT:
        sessions["onnxruntime"] = ort.InferenceSession(file)
    else:  # the one file's loop has no exact kernel here, the folder has
        found["onnxruntime"] = OnnxTransformer(folder, threads=1).generate(
            sources, max_new_tokens=options.max_new_tokens
        )
    for name, session in sessions.items():
        found[name] = []
        for ids in sources:
            row = np.array([ids + [checkpoint.config.pad_id] * (-len(ids) % SOURCE_MULTIPLE)])
            given = {"input_ids": row, "attention_mask": (np.arange(row.shape[1]) < len(ids))[None].astype(np.int64)}
            found[name].append(session.run(["sequences"], given)[0][0, 0].tolist())
    host.close()
    apart = [i for i, pair in enumerate(zip(*found.values(), strict=True)) if pair[0] != pair[1]]
    assert len(apart) <= 0.1 * len(sources)
    for name, rows in found.items():
        engine = open_engine(name, checkpoint, folder, threads=1)
        written = [ids for ids, _ in engine.search([sources[i] for i in [*apart, 0]], options)]
        assert written == [rows[i] for i in [*apart, 0]]
        for i, ids in zip([*apart, 0], written, strict=True):
            assert certified_flip(engine, stored, sources[i], ids, options), (name, i)
        assert certified_flip(engine, stored, sources[0], written[-1][::-1], options) is None
