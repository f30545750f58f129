"""Damaged ONNX folders are refused by whatever opens them, before the first word; --no-verify takes them as is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import LINES, TEXT, both_models, caller, refused

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from export.__main__ import main as export_main
from mlx_transformer.system import manifest
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import write_manifest

made = pytest.fixture(scope="module")(both_models)
call = pytest.fixture(caller)
DATA = "model.onnx_data"


def changed(file: Path) -> None:
    """A few weights in the middle change places."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 8 * 4
    data[middle : middle + 800] = data[middle + 4 : middle + 800] + data[middle : middle + 4]
    file.write_bytes(data)


@pytest.fixture
def damaged(made, tmp_path) -> Path:
    folder = tmp_path / "damaged"
    shutil.copytree(made / "onnx", folder)
    changed(folder / "onnx" / DATA)
    return folder


def test_every_command_names_the_damage(call, made, damaged, tmp_path):
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    files = ["--source", tmp_path / "text", "--reference", tmp_path / "text"]
    said = f"{DATA}: damaged (its SHA-256 differs)"
    for command in (["translate"], ["evaluate", *files], ["info"]):
        refused(call(command[0], damaged, *command[1:], stdin=TEXT), said)
    status, out, error = call("validate", made / "model", damaged, "--runtimes", "onnxruntime")
    assert (status, out, said in error, error.count("\n")) == (2, "", True, 1)
    for command in (["translate", damaged], ["validate", made / "model", damaged, "--runtimes", "onnxruntime"]):
        assert export_main([str(argument) for argument in command]) == 2


def test_the_server_does_not_start(damaged, capfd):
    pytest.importorskip("uvicorn")
    assert export_main(["serve", str(damaged), "--port", "0"]) == 2
    assert f"{DATA}: damaged (its SHA-256 differs)" in capfd.readouterr().err


@pytest.mark.slow
def test_on_request_it_is_taken_as_it_is(call, made, damaged):
    status, words, said = call("translate", damaged, "--no-verify", stdin=TEXT)
    assert (status, said, words.count("\n")) == (0, "", len(LINES))
    status, out, _ = call("validate", made / "model", damaged, "--runtimes", "onnxruntime", "--no-verify")
    assert (status, "validate: mismatch" in out) == (1, True)
    with pytest.raises(UserError, match="SHA-256 differs"):
        OnnxTransformer(damaged)
    assert "".join(f"{line}\n" for line in OnnxTransformer(damaged, verify=False).translate(LINES)) == words


def test_a_missing_file_is_named_even_where_another_would_do(call, made, tmp_path):
    """Without the pair of decoders the merged one runs the model."""
    folder = tmp_path / "folder"
    shutil.copytree(made / "onnx", folder)
    (folder / "onnx" / "decoder_with_past_model.onnx").unlink()
    said = "decoder_with_past_model.onnx: listed in manifest.json but missing"
    refused(call("translate", folder, stdin=TEXT), said)
    status, _, error = call("validate", made / "model", folder, "--runtimes", "onnxruntime")
    assert (status, said in error) == (2, True)
    assert OnnxTransformer(folder, verify=False).translate(LINES) == OnnxTransformer(made / "onnx").translate(LINES)


def test_a_changed_graph_is_never_loaded(made, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    shutil.copytree(made / "onnx", folder)
    graph = folder / "onnx" / "encoder_model.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"Softmax", b"Sigmoid"))
    monkeypatch.setattr("export.runtime.sessions.open_session", lambda *_: pytest.fail("opened"))
    with pytest.raises(UserError, match=r"encoder_model\.onnx: damaged \(its SHA-256 differs\)"):
        OnnxTransformer(folder)


def test_of_several_precisions_only_the_used_one_is_read(made, tmp_path, monkeypatch):
    folder = export_onnx(made / "model", tmp_path / "onnx", precision=["float32", "int8", "int8-weights"])
    read: list[str] = []
    original = manifest.sha256
    monkeypatch.setattr(manifest, "sha256", lambda path: read.append(path.name) or original(path))
    for precision, suffix in (("float32", ""), ("int8", "_quantized"), ("int8-weights", "_int8")):
        read.clear()
        OnnxTransformer(folder, precision=precision)
        graphs = {f"{name}{suffix}.onnx" for name in ("encoder_model", "decoder_model", "decoder_with_past_model")}
        assert set(read) == {
            *graphs,
            f"model{suffix}.onnx_data",
            "config.json",
            "mlx_transformer.json",
            "tokenizer.json",
            "manifest.json",
        }
    changed(folder / "onnx" / "model_int8.onnx_data")
    OnnxTransformer(folder, precision="float32")
    with pytest.raises(UserError, match=r"model_int8\.onnx_data: damaged"):
        OnnxTransformer(folder, precision="int8-weights")


@pytest.mark.parametrize("target", ["cpu", "web"])
def test_every_target(made, tmp_path, target):
    folder = export_onnx(made / "model", tmp_path / "onnx", target=target)
    OnnxTransformer(folder)
    for file in sorted((folder / "onnx").glob("*.onnx_data")):
        before = file.read_bytes()
        changed(file)
        with pytest.raises(UserError, match=f"{file.name}: damaged"):
            OnnxTransformer(folder)
        file.write_bytes(before)
    assert list((folder / "onnx").glob("*.onnx_data"))


def test_a_file_with_the_search_inside_where_a_manifest_lists_it(made, tmp_path):
    file = export_search(made / "model", tmp_path / "model.onnx", external=True)
    changed(tmp_path / "model.onnx_data")
    SearchModel(file)
    write_manifest(tmp_path)
    SearchModel(file)
    changed(tmp_path / "model.onnx_data")
    with pytest.raises(UserError, match=r"model\.onnx_data: damaged"):
        SearchModel(file)
    SearchModel(file, verify=False)


def test_folders_of_other_tools_have_no_manifest(made, tmp_path):
    shutil.copytree(made / "onnx", tmp_path / "folder")
    for place in ("onnx", "."):
        (tmp_path / "folder" / place / "manifest.json").unlink()
    changed(tmp_path / "folder" / "onnx" / DATA)
    assert len(OnnxTransformer(tmp_path / "folder").translate(LINES)) == len(LINES)
