"""Folders of earlier versions, whose graphs of target cpu have other names, open as they did."""

from pathlib import Path

import pytest
from random_models import write_model
from small_models import encoder_decoder

from export import OnnxTransformer
from export.runtime.folder import OLD_GRAPH_NAMES, has_graph, precisions
from export.validate import compare
from mlx_transformer.core.checkpoint import write_manifest
from mlx_transformer.system.errors import UserError

ROWS = [[5, 6, 7, 8, 2], [9, 2], [10, 11, 12, 2]]


def renamed(folder: Path) -> list[str]:
    """Give the graphs the names that earlier versions wrote; returns these."""
    names = []
    for path in sorted((folder / "onnx").glob("*.onnx")):
        for name, earlier in OLD_GRAPH_NAMES.items():
            if path.name.startswith(name):
                names.append(path.name.replace(name, earlier))
                path.rename(path.with_name(names[-1]))
    write_manifest(folder / "onnx")
    return names


def test_a_folder_of_an_earlier_version(tmp_path: Path) -> None:
    made = {"target": "cpu", "precision": ["float32", "int8"]}
    checkpoint, folder = write_model(encoder_decoder("paper"), tmp_path, 1, **made)
    known = precisions(folder)
    before = [OnnxTransformer(folder, threads=1, precision=p).search(ROWS, max_new_tokens=6) for p in known]
    files = renamed(folder)
    assert [file for file in files if "_quantized" not in file] == ["decoder_rows.onnx", "encoder_rows.onnx"]
    assert precisions(folder) == known
    assert has_graph(folder, "encoder_cpu")
    assert [OnnxTransformer(folder, threads=1, precision=p).search(ROWS, max_new_tokens=6) for p in known] == before
    assert compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=8, threads=1, searches=False).equal

    (folder / "onnx" / "decoder_rows.onnx").unlink()
    with pytest.raises(UserError, match=r"decoder_cpu\.onnx missing; export the model again"):
        OnnxTransformer(folder)
