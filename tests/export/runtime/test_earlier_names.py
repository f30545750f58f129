"""Folders of earlier versions, whose graphs of targets cpu and coreml have other names, open as they did."""

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
OPTIONS = {"cpu": {"precision": ["float32", "int8"]}, "coreml": {"fixed_shape": "2x12x12"}}


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


@pytest.mark.parametrize("target", OPTIONS)
def test_a_folder_of_an_earlier_version(target: str, tmp_path: Path) -> None:
    checkpoint, folder = write_model(encoder_decoder("paper"), tmp_path, 1, target=target, **OPTIONS[target])
    known = precisions(folder)
    before = [OnnxTransformer(folder, threads=1, precision=p).search(ROWS, max_new_tokens=6) for p in known]
    files = renamed(folder)
    earlier = {"cpu": ["decoder_rows", "encoder_rows"], "coreml": ["decoder_fixed", "encoder_fixed"]}[target]
    assert [file for file in files if "_quantized" not in file] == [f"{name}.onnx" for name in earlier]
    assert precisions(folder) == known
    assert has_graph(folder, f"encoder_{target}")
    assert [OnnxTransformer(folder, threads=1, precision=p).search(ROWS, max_new_tokens=6) for p in known] == before
    assert compare(checkpoint, folder, ["onnxruntime"], seed=5, longest=8, threads=1, searches=False).equal

    (folder / "onnx" / f"{earlier[0]}.onnx").unlink()
    with pytest.raises(UserError, match=f"decoder_{target}.onnx missing; export the model again"):
        OnnxTransformer(folder)
