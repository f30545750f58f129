"""Bytes of data files: each is a tensor's of some graph or a zero between two, and no two tensors share some."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from combined import thinned
from random_models import write_model
from small_models import encoder_decoder

from export.package import export_onnx
from export.package.weights import ALIGNMENT
from export.search import export_search
from export.targets.table import TARGETS
from export.validate import compare, validate_command
from export.validate.checks.weights import LISTED, DataFile, data_files
from export.validate.engines import open_engine
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError

WEIGHT = "decoder.layers.0.feed_forward.up_proj.weight"
# Vectors of 70 numbers (280 bytes) leave padding before what follows them.
UNEVEN = TransformerConfig(
    vocab_size=37, d_model=70, heads=2, d_ff=35, encoder_layers=1, decoder_layers=1, max_positions=9
)
Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model(UNEVEN, tmp_path_factory.mktemp("m"), 1, external_threshold=64)


@pytest.fixture
def changed(exported: tuple[Path, Path], tmp_path: Path) -> Path:
    """The folder of the graphs, to be spoiled."""
    return Path(shutil.copytree(exported[1], tmp_path / "changed")) / "onnx"


def found(checkpoint: Path, package: Path, runtime: str = "onnxruntime") -> list[DataFile]:
    return list(data_files([open_engine(runtime, open_checkpoint(checkpoint), package, 1)]))


def place_of(graphs: Path, name: str = WEIGHT) -> tuple[int, int]:
    """(offset, length) of a tensor."""
    for path in graphs.glob("*.onnx"):
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            if tensor.name == name:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                return int(entries["offset"]), int(entries["length"])
    raise LookupError(name)


def write_bytes(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)


def edit_tensor(graphs: Path, edit: Callable[[onnx.TensorProto], None], only: str = "*", name: str = WEIGHT) -> None:
    for path in graphs.glob(f"{only}.onnx"):
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            if tensor.name == name:
                edit(tensor)
        path.write_bytes(model.SerializeToString())


def set_place(key: str, change: Callable[[int], int]) -> Callable[[onnx.TensorProto], None]:
    def edit(tensor: onnx.TensorProto) -> None:
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = str(change(int(entry.value)))

    return edit


@pytest.mark.slow
def test_data_files_with_several_links_are_read(exported: tuple[Path, Path], changed: Path, tmp_path: Path) -> None:
    """onnx's own readers refuse them, and a copy by `cp -l`, a snapshot or a package's cache has them."""
    for file in changed.glob("*.onnx_data"):
        (tmp_path / file.name).hardlink_to(file)
    report = compare(
        exported[0], changed.parent, ["onnxruntime", "evaluator"], seed=1, longest=5, threads=1, searches=False
    )
    assert report.equal, report.failures


@pytest.mark.parametrize("target", thinned(TARGETS, 2))
def test_every_byte_of_an_export_is_read(target: str, tmp_path: Path) -> None:
    paths = write_model(encoder_decoder("modern"), tmp_path, 1, target=target, external_threshold=64)
    files = found(*paths)
    assert [file.file for file in files] == sorted(path.name for path in (paths[1] / "onnx").glob("*_data"))
    assert files
    for file in files:
        assert file.passed, file.problems
        assert file.size == (paths[1] / "onnx" / file.file).stat().st_size


def test_padding_is_counted(exported: tuple[Path, Path]) -> None:
    [file] = found(*exported)
    assert file.passed
    assert (file.file, file.graphs) == ("model.onnx_data", 4)
    assert file.padding > ALIGNMENT
    read = set()
    for path in (exported[1] / "onnx").glob("*.onnx"):
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            read.add(tuple(int(e.value) for e in tensor.external_data if e.key in ("offset", "length")))
    read.discard(())
    assert file.tensors == len(read)
    assert file.size == file.padding + sum(length for _, length in read)


def test_all_precisions_of_a_folder(exported: tuple[Path, Path], tmp_path: Path) -> None:
    both = export_onnx(exported[0], tmp_path / "both", precision=["float32", "bfloat16"])
    assert [(file.file, file.passed) for file in found(exported[0], both)] == [
        ("model.onnx_data", True),
        ("model_bf16.onnx_data", True),
    ]


def lengthened(graphs: Path) -> None:
    with (graphs / "model.onnx_data").open("ab") as file:
        file.write(bytes(8))


def removed(graphs: Path) -> None:
    for path in graphs.glob("decoder*.onnx"):
        model = onnx.load(path, load_external_data=False)
        kept = [tensor for tensor in model.graph.initializer if tensor.name != WEIGHT]
        inside = onnx.numpy_helper.from_array(np.zeros((35, 70), np.float32), WEIGHT)
        del model.graph.initializer[:]
        model.graph.initializer.extend([*kept, inside])
        path.write_bytes(model.SerializeToString())


def hole(graphs: Path) -> None:
    """Whole lines of zeros before the last tensor: aligned, but no padding."""
    file = graphs / "model.onnx_data"
    data = file.read_bytes()
    for path in graphs.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            entries = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
            if entries and entries["offset"] + entries["length"] == len(data):
                set_place("offset", lambda offset: offset + ALIGNMENT)(tensor)
                last = entries["offset"]
        path.write_bytes(model.SerializeToString())
    file.write_bytes(data[:last] + bytes(ALIGNMENT) + data[last:])


def written_padding(graphs: Path) -> None:
    data = graphs / "model.onnx_data"
    offset, length = place_of(graphs, "encoder.layers.0.feed_forward.down_proj.bias")
    assert (offset + length) % ALIGNMENT
    write_bytes(data, offset + length, b"\1")


def overlapping(graphs: Path) -> None:
    edit_tensor(graphs, set_place("offset", lambda offset: offset - 64), "decoder_model")


def shortened(graphs: Path) -> None:
    edit_tensor(graphs, set_place("length", lambda length: length - 280))


def other_type(graphs: Path) -> None:
    def edit(tensor: onnx.TensorProto) -> None:
        tensor.data_type = onnx.TensorProto.INT32

    edit_tensor(graphs, edit, "decoder_model_merged")


def cut(graphs: Path) -> None:
    data = graphs / "model.onnx_data"
    data.write_bytes(data.read_bytes()[:-4])


def left_over(graphs: Path) -> None:
    (graphs / "old.onnx_data").write_bytes(bytes(10))


def lost(graphs: Path) -> None:
    (graphs / "model.onnx_data").unlink()


SPOILT: dict[Edit, str] = {
    lengthened: r"\(8\) are read by no tensor$",
    removed: r"\(9,8\d\d\) are read by no tensor$",  # and the padding beside it
    hole: r"\((6[4-9]|[7-9]\d|1[01]\d|12[0-7])\) are read by no tensor$",
    written_padding: "and aren't the zeros that would align the next$",
    overlapping: f"{WEIGHT} of decoder_model.onnx overlaps .*, by ",
    shortened: r"\(336\) are read by no tensor$",
    other_type: "as INT32$",
    cut: "ends at byte .*, the file has ",
    left_over: r"^bytes 0 to 9 \(10\) are read by no tensor$",
    lost: "^is missing$",
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_said(spoil: Edit, exported: tuple[Path, Path], changed: Path) -> None:
    engine = open_engine("onnxruntime", open_checkpoint(exported[0]), exported[1], 1)
    files = {name: changed / path.name for name, path in engine.capabilities.files.items()}
    engine.capabilities = replace(engine.capabilities, files=files)
    assert all(file.passed for file in data_files([engine]))
    spoil(changed)
    problems = [problem for file in data_files([engine]) for problem in file.problems]
    assert any(re.search(SPOILT[spoil], problem) for problem in problems), problems


def test_a_graph_of_nonsense_is_one_line(exported: tuple[Path, Path], changed: Path) -> None:
    engine = open_engine("onnxruntime", open_checkpoint(exported[0]), changed.parent, 1)
    edit_tensor(changed, set_place("offset", lambda offset: -offset), "decoder_model")
    with pytest.raises(UserError, match=r"decoder_model.onnx: its tensors' places can't be read .*; export the model"):
        list(data_files([engine]))
    (changed / "more.onnx").write_bytes(b"nonsense")
    (changed / "decoder_model.onnx").unlink()
    with pytest.raises(UserError, match=r"more\.onnx: its tensors' places can't be read"):
        list(data_files([engine]))


def test_the_list_is_bounded(exported: tuple[Path, Path], changed: Path) -> None:
    engine = open_engine("onnxruntime", open_checkpoint(exported[0]), changed.parent, 1)
    (changed / "model.onnx_data").write_bytes(b"")
    [file] = data_files([engine])
    assert len(file.problems) == LISTED + 1
    assert file.problems[-1] == f"and {file.tensors - LISTED} more"


def test_it_is_a_mismatch_with_a_line_of_its_own(exported: tuple[Path, Path], changed: Path, capsys) -> None:
    report = compare(*exported, ["onnxruntime"], seed=1, longest=5, threads=1, searches=False)
    assert report.equal, report.failures()
    assert report.data_files[0].summary in _printed(report, capsys)
    lengthened(changed)
    options = dict(runtimes=["onnxruntime"], seed=1, threads=1, verify=False)
    page = changed.parent.parent / "report.html"
    assert validate_command(exported[0], changed.parent, **options, html=page) == 1
    size = (changed / "model.onnx_data").stat().st_size
    line = f"model.onnx_data: bytes {size - 8:,} to {size - 1:,} (8) are read by no tensor"
    assert f"  {line}\n" in capsys.readouterr().out
    assert line.removeprefix("model.onnx_data: ") in page.read_text(encoding="utf-8")


def _printed(report, capsys) -> str:
    report.print()
    return " ".join(capsys.readouterr().out.split())


def test_one_file_and_its_data(exported: tuple[Path, Path], tmp_path: Path) -> None:
    """Other files of its folder are no business of it."""
    path = export_search(exported[0], tmp_path / "a[1].onnx", external=True)
    left_over(tmp_path)
    [file] = found(exported[0], path)
    assert (file.file, file.graphs, file.problems) == ("a[1].onnx_data", 1, ())
    with path.with_name("a[1].onnx_data").open("ab") as data:
        data.write(b"more")
    [file] = found(exported[0], path)
    assert "(4) are read by no tensor" in file.problems[0]


def test_weights_inside_need_no_data_file(exported: tuple[Path, Path], tmp_path: Path) -> None:
    assert found(exported[0], export_search(exported[0], tmp_path / "inside.onnx")) == []
