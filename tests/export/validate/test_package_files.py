"""Every value of every file around the graphs: another one is named, with its file and its key."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from combined import thinned
from command_line import caller
from small_packages import FILES, PACKAGES, write_package

from export import OnnxTransformer
from export.validate import compare
from export.validate.checks.package_files import PackageFiles, differences, package_files
from mlx_transformer.core.checkpoint import Checkpoint, open_checkpoint
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import CARD, MANIFEST, write_manifest

call = pytest.fixture(caller)
FREE = (
    "mlx_transformer.json: versions",
    "mlx_transformer.json: precisions.int8.quality",
    "mlx_transformer.json: precisions.int4.quality",
    "mlx_transformer.json: precisions.int8.layers",
)
"""What only the export itself could know."""
SHOWN = ("mlx_transformer.json: cross_attention", "int8_scales.json: products")
"""Choices that the graphs' numbers and nodes show: which attention is returned, and the scales of integers."""
RECORD = "mlx_transformer.json"
MOST, LARGE = 7, 60_000
"""Values of one file that are tried, some of a vocabulary's; fewer of a file of more bytes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """made(name) -> a checkpoint and its package, made once."""
    known: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in known:
            known[name] = write_package(name, tmp_path_factory.mktemp("package"))
        return known[name]

    return make


def leaves(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values that hold no others."""
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    if not isinstance(values, dict | list) or not values:
        yield path
    for key, value in inside:
        yield from leaves(value, (*path, key))


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else [1] if value == [] else 1


def changed(values: Any, path: tuple[Any, ...]) -> Any:
    """A copy with another value there."""
    if not path:
        return another(values)
    copied = copy.copy(values)
    copied[path[0]] = changed(values[path[0]], path[1:])
    return copied


def key_of(path: tuple[Any, ...]) -> str:
    parts = (
        f"[{key}]" if isinstance(key, int) else f".{key}" for key in path if isinstance(key, int) or key.isidentifier()
    )
    return "".join(parts).removeprefix(".")


def check(model: Path, folder: Path) -> PackageFiles:
    return check_opened(open_checkpoint(model), folder)


def check_opened(opened: Checkpoint, folder: Path) -> PackageFiles:
    files = package_files(opened, folder)
    assert files is not None
    return files


def files_of(folder: Path) -> list[Path]:
    """All that isn't a graph, its data, a manifest or the card."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name not in (CARD, MANIFEST))
    return [file for file in files if not file.suffix.startswith(".onnx")]


@pytest.mark.fast("calibrated", "encoder-decoder", "an adapter", "two vocabularies")
@pytest.mark.parametrize("name", PACKAGES)
def test_another_value_of_any_file_is_named(name: str, made: Callable[[str], tuple[Path, Path]]) -> None:
    model, folder = made(name)
    assert check(model, folder).problems == ()
    opened, tried = open_checkpoint(model), 0
    for file in files_of(folder):
        before, place = file.read_bytes(), file.relative_to(folder).as_posix()
        values = json.loads(before) if file.suffix == ".json" else None
        paths = [(at,) for at in (0, len(before) // 2, len(before) - 1)] if values is None else list(leaves(values))
        paths = [path for path in paths if not f"{place}: {key_of(path)}".startswith(FREE)]
        step = max(1, len(paths) // (MOST if len(before) < LARGE else 5))
        paths = paths[[*PACKAGES].index(name) % step :: step]  # other ones in each package
        for path in paths:
            if values is None:
                data = bytearray(before)
                data[path[0]] ^= 1
                file.write_bytes(data)
            else:
                file.write_text(json.dumps(changed(values, path)), encoding="utf-8")
            tried += 1
            keys = [key for key in path if isinstance(key, str)][-1:]
            found = list(differences(file, before))  # it was equal to what the checkpoint gives
            assert found, (place, path)
            assert all(key in found[0] for key in keys), (place, path, found)
            if (place == RECORD and tried % 3 == 0) or (
                path in (paths[0], paths[-1]) and not f"{place}: {key_of(path)}".startswith(SHOWN)
            ):
                problems = check_opened(opened, folder).problems
                shown = f"{place}: {key_of(path)}".startswith(SHOWN)
                named = (place, RECORD, "shortlist.bin")
                assert shown or any(line.startswith(named) for line in problems), (place, path, problems)
        file.unlink()
        assert any(line.startswith((place, RECORD)) for line in check_opened(opened, folder).problems), place
        file.write_bytes(before)
    assert check(model, folder).problems == ()
    assert tried > 20


@pytest.mark.fast("triton")
@pytest.mark.parametrize("name", thinned([*FILES, "triton"], 4))
def test_another_value_in_one_file_is_named(name: str, tmp_path: Path) -> None:
    checkpoint, path = write_package(name, tmp_path)
    opened, model = open_checkpoint(checkpoint), onnx.load(path, load_external_data=False)
    assert check(checkpoint, path).problems == ()
    before, tried = path.read_bytes(), 0
    for entry in model.metadata_props:
        text = entry.value
        values = json.loads(text) if text.startswith("{") else text
        found = list(leaves(values))
        for place in found[:: max(1, len(found) // 12)]:
            changes = changed(values, place)
            entry.value = changes if isinstance(values, str) else json.dumps(changes)
            path.write_bytes(model.SerializeToString())
            found_problems = check_opened(opened, path).problems
            # Of a layer whose attention is returned the graph alone tells which it is; there are no others than those.
            if entry.key != "mlx_transformer.cross_attention":
                named = (entry.key, "says no export", "shortlist.bin", "m.onnx: int8_scales.json: ")
                said = any(name in line for name in named for line in found_problems)
                assert said, (entry.key, place, found_problems)
            tried += 1
        entry.value = text
    defaults = {value.name for value in model.graph.input} & {tensor.name for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        if tensor.name in defaults and (data := bytearray(tensor.raw_data)):
            kept = tensor.raw_data
            data[0] ^= 1
            tensor.raw_data = bytes(data)
            path.write_bytes(model.SerializeToString())
            assert any(f"input {tensor.name} is" in line for line in check_opened(opened, path).problems), tensor.name
            tensor.raw_data = kept
    path.write_bytes(before)
    for beside in (*path.parent.glob("*.bin"), *path.parent.parent.glob("config.pbtxt")):
        contents = beside.read_bytes()
        beside.write_bytes(contents[:-2] + bytes([contents[-2] ^ 1]) + contents[-1:])
        assert any(beside.name in line for line in check_opened(opened, path).problems), beside
        if beside.suffix == ".bin":
            beside.unlink()
            assert any(beside.name in line for line in check_opened(opened, path).problems), beside
        beside.write_bytes(contents)
    assert check(checkpoint, path).problems == ()
    assert tried > 10


EXTRA = {
    "onnx/decoder_model_quantized.onnx": True, "vocab.txt": True, "added_tokens.json": True, "onnx/config.json": True,
    "tokenizer.model": True, "LICENSE": False, "pictures/one.png": False,
}  # fmt: skip
"""Files that belong to no package, and whether somebody would read them."""


def test_files_that_belong_to_no_package(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    model, folder = made("encoder-decoder")
    shutil.copytree(folder, tmp_path / "onnx")
    for name in EXTRA:
        (tmp_path / "onnx" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "onnx" / name).write_text("{}", encoding="utf-8")
    files = check(model, tmp_path / "onnx")
    named = [line.partition(":")[0] for line in files.problems]
    assert named == sorted(name for name, read in EXTRA.items() if read)
    assert files.unread == tuple(sorted(name for name, read in EXTRA.items() if not read))


def set_json(file: Path, *path: Any, value: Any) -> None:
    values = json.loads(file.read_text(encoding="utf-8"))
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def test_a_record_that_does_not_fit_its_graphs(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """Each of these would be what another export writes, but for its graphs."""
    edits: list[tuple[str, tuple[Any, ...], Any, str]] = [
        ("vectors, for cpu", ("inputs_embeds",), None, "onnx/model.onnx"),
        ("vectors, cut", ("sentence_embedding",), None, "mlx_transformer.json"),
        ("two vocabularies", ("cross_attention",), None, "onnx/decoder_cpu.onnx"),
        ("decoder in int4", ("precisions", "int4", "activations"), "int8", "onnx/model_q4.onnx"),
        ("decoder in int4", ("target",), "web", "mlx_transformer.json"),
        ("encoder-decoder", ("target",), "cpu", "onnx/encoder_cpu.onnx"),
        ("encoder-decoder", ("precisions", "int8"), {"suffix": "_quantized"}, "onnx/encoder_model_quantized.onnx"),
    ]
    for i, (name, path, value, named) in enumerate(edits):
        model, folder = made(name)
        shutil.copytree(folder, tmp_path / str(i))
        file = tmp_path / str(i) / "mlx_transformer.json"
        set_json(file, *path, value=value)
        if value is None:
            values = json.loads(file.read_text(encoding="utf-8"))
            del values[path[0]]
            file.write_text(json.dumps(values), encoding="utf-8")
        problems = check(model, tmp_path / str(i)).problems
        assert any(line.startswith(named) for line in problems), (name, path, problems)


COMMANDS: list[tuple[str, str, tuple[Any, ...], Any]] = [
    ("encoder-decoder", "generation_config.json", ("eos_token_id",), 3),
    ("calibrated", "int8_scales.json", ("products", "encoder.layers.0.feed_forward.up_proj.weight", "activation"), 9.5),
]


@pytest.mark.fast("encoder-decoder-generation_config.json-path0-3")
@pytest.mark.parametrize(("name", "file", "path", "value"), COMMANDS)
def test_the_command_says_so(call, made, tmp_path, name, file, path, value) -> None:
    model, folder = made(name)
    shutil.copytree(folder, tmp_path / "onnx")
    set_json(tmp_path / "onnx" / file, *path, value=value)
    write_manifest(tmp_path / "onnx")
    report = tmp_path / "report.json"
    arguments = ("--runtimes", "onnxruntime:cpu:all:int8" if name == "calibrated" else "onnxruntime")
    html = tmp_path / "report.html"
    status, out, _ = call("validate", model, tmp_path / "onnx", *arguments, "--json", report, "--html", html)
    assert status == 1
    if name == "calibrated":  # taken at the export: what graphs are held against
        assert "up_proj.weight: activations in units of" in out
        return
    line = f"{file}: {'.'.join(path)} is {json.dumps(value)}, the checkpoint gives"
    assert line in out.replace("\n", " ")
    values = json.loads(report.read_text(encoding="utf-8"))
    assert values["verdict"] == "mismatch"
    assert any(problem.startswith(line) for problem in values["files"]["problems"])
    assert "<h2>Files</h2>" in html.read_text(encoding="utf-8")
    assert line.partition(" is ")[0] in html.read_text(encoding="utf-8")


def test_what_is_equal_has_the_row(made, capsys) -> None:
    model, folder = made("decoder")
    report = compare(model, folder, ["onnxruntime"], 1, searches=False)
    assert report.equal, report.failures()
    assert report.files is not None
    assert report.files.compared == len(files_of(Path(report.onnx)))
    report.print()
    assert f"files around the graphs: {report.files.compared}," in capsys.readouterr().out


def test_the_graphs_of_another_export(call, made, tmp_path) -> None:
    """An interrupted copy: graphs of one export, everything around them of another."""
    _, folder = made("encoder-decoder")
    _, other = made("an imported student")
    shutil.copytree(folder, tmp_path / "mixed")
    shutil.rmtree(tmp_path / "mixed" / "onnx")
    shutil.copytree(other / "onnx", tmp_path / "mixed" / "onnx")
    said = "the files in onnx/ and those around it aren't of one export"
    for command in (["translate"], ["info"], ["serve", "--port", "0"]):
        status, _, error = call(command[0], tmp_path / "mixed", *command[1:], stdin="one\n")
        assert (status, said in error.replace("\n", " "), error.count("\n")) == (2, True, 1), error
    with pytest.raises(UserError, match=said):
        OnnxTransformer(tmp_path / "mixed")
    (folder / MANIFEST).replace(tmp_path / "kept")
    write_manifest(folder)
    assert (folder / MANIFEST).read_bytes() == (tmp_path / "kept").read_bytes()


def test_a_package_of_an_earlier_version_opens(made, tmp_path) -> None:
    """Its manifest doesn't list the graphs' own."""
    _, folder = made("encoder-decoder")
    shutil.copytree(folder, tmp_path / "onnx")
    values = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    del values["files"]["onnx/manifest.json"]
    (tmp_path / "onnx" / MANIFEST).write_text(json.dumps(values), encoding="utf-8")
    assert OnnxTransformer(tmp_path / "onnx").generate([[5, 6, 2]]) == OnnxTransformer(folder).generate([[5, 6, 2]])


def test_a_package_without_its_record(made, tmp_path) -> None:
    model, folder = made("encoder-decoder")
    shutil.copytree(folder, tmp_path / "onnx")
    (tmp_path / "onnx" / "mlx_transformer.json").unlink()
    assert check(model, tmp_path / "onnx").problems == ("mlx_transformer.json: is missing",)
    for place in ("onnx", "onnx/onnx"):
        (tmp_path / place / MANIFEST).unlink()
    assert package_files(open_checkpoint(model), tmp_path / "onnx") is None
