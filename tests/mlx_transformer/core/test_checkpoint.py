"""A checkpoint folder: what is written comes back, damage is found."""

from __future__ import annotations

import json
import math
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from small_checkpoint import CONFIG, TOKENIZER, contents, refusal, saved, weights

from mlx_transformer.core import checkpoint
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.system import durable
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import verify_files
from mlx_transformer.system.tensors import TYPES, read_tensors, write_tensors


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "one")


def test_what_is_written_comes_back(folder):
    opened = open_checkpoint(folder)
    assert opened.config == CONFIG
    assert opened.tokenizer_path is not None
    assert opened.tokenizer_path.read_text(encoding="utf-8") == TOKENIZER
    assert opened.names() == list(parameter_shapes(CONFIG))
    for name, array in weights().items():
        np.testing.assert_array_equal(opened.tensor(name), array)
    assert [name for name, _ in opened.tensors()] == opened.names()
    extra = read_tensors(folder / "optimizer.safetensors")
    assert extra["step"].shape == ()
    assert extra["step"] == 7
    assert extra["m"].tolist() == [[1, 1], [1, 1]]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        (folder / "config.json").stat().st_mode & 0o777
    }


def test_the_same_contents_give_the_same_bytes(folder, tmp_path):
    assert contents(saved(tmp_path / "two")) == contents(folder)


def test_a_runs_folder_means_its_model(tmp_path):
    folder = saved(tmp_path / "run" / "model")
    assert open_checkpoint(tmp_path / "run").folder == folder
    os.rename(folder, durable.previous(folder))  # killed between two renames
    assert open_checkpoint(folder).config == open_checkpoint(tmp_path / "run").config == CONFIG


@pytest.mark.parametrize("seed", range(2))
def test_flipped_bits_and_cut_files_are_found(folder, seed):
    """A sample; the test of every byte is among the slow ones."""
    rng = np.random.default_rng(seed)
    for name, data in guarded(folder).items():
        places = rng.integers(0, len(data), 25)
        for place in places:
            check_damage(folder, name, data, data[:place])
            check_damage(folder, name, data, flipped(data, place, rng.integers(8)))


@pytest.mark.slow
def test_every_flipped_bit_and_every_cut_is_found(folder):
    for name, data in guarded(folder).items():
        for place in range(len(data)):
            check_damage(folder, name, data, data[:place])
            for bit in range(8):
                check_damage(folder, name, data, flipped(data, place, bit))


def guarded(folder):
    """All files but the card, in which people write."""
    return {name: data for name, data in contents(folder).items() if name != "README.md"}


def flipped(data, place, bit):
    return data[:place] + bytes([data[place] ^ (1 << int(bit))]) + data[place + 1 :]


def check_damage(folder, name, data, damaged):
    path = folder / name
    path.write_bytes(damaged)
    message = refusal(open_checkpoint, folder)
    if message:
        assert str(folder) in message
        assert "\n" not in message
    else:
        # The manifest guards the others; of itself only what JSON does not read may change.
        assert name == "manifest.json"
        assert json.loads(damaged) == json.loads(data)
    path.write_bytes(data)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_without_a_manifest_damage_is_an_error_or_harmless(folder, data):
    assert_error_or_harmless(folder, data)


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_without_a_manifest_no_damage_of_many_is_harmful(folder, data):
    assert_error_or_harmless(folder, data)


def assert_error_or_harmless(folder, data):
    """Another tool's folder: whatever the bytes are, nothing but `UserError` comes out."""
    (folder / "manifest.json").unlink(missing_ok=True)
    name = data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    original = (folder / name).read_bytes()
    reach = min(len(original), 2000)  # the header, where the dangers are
    place = data.draw(st.integers(0, reach - 1))
    piece = data.draw(st.one_of(st.binary(max_size=8), st.sampled_from([b"-1", b"9" * 30, b"null", b"[" * 2000, b""])))
    (folder / name).write_bytes(original[:place] + piece + original[place + data.draw(st.integers(0, 8)) :])
    try:
        opened = open_checkpoint(folder)
        assert {name: array.shape for name, array in opened.tensors()} == parameter_shapes(opened.config)
    except UserError as error:
        assert str(folder) in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    finally:
        (folder / name).write_bytes(original)


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=2), r"format 2 is not known .*reads format 1"),
        (lambda m: m["files"].update({"../one/config.json": m["files"]["config.json"]}), "leaves the folder"),
        (lambda m: m["files"].update({"/etc/hostname": m["files"]["config.json"]}), "leaves the folder"),
        (lambda m: m["files"].update({"more.txt": m["files"]["config.json"]}), "more.txt: listed in .* but missing"),
        (lambda m: m["files"].pop("model.safetensors"), "model.safetensors is not listed"),
        (lambda m: m.pop("files"), "damaged manifest"),
        (lambda m: m.update(files=[1]), "damaged manifest"),
        (lambda m: m["files"].update({"config.json": "abc"}), "damaged manifest"),
        (lambda m: m["files"]["config.json"].update(bytes=float("inf")), "damaged manifest"),
        (lambda m: m["files"]["config.json"].update(bytes=3), "bytes, expected 3"),
    ],
)
def test_manifests_that_lie_are_refused(folder, change, message):
    edit_manifest(folder, change)
    with pytest.raises(UserError, match=message):
        open_checkpoint(folder)


def test_a_missing_file_is_named(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: listed in manifest\.json but missing"):
        open_checkpoint(folder)
    (folder / "manifest.json").unlink()
    assert open_checkpoint(folder).tokenizer_path is None
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"not a checkpoint folder \(model\.safetensors missing\)"):
        open_checkpoint(folder)


def rewrite(folder, arrays):
    save_file(arrays, folder / "model.safetensors")
    (folder / "manifest.json").unlink(missing_ok=True)


def test_other_weights_are_refused_listing_every_difference(folder):
    wrong = weights()
    wrong["embedding.weight"] = wrong["embedding.weight"].T.copy()
    wrong["encoder.extra"] = wrong.pop("encoder.layers.0.feed_forward.up_proj.weight")
    with pytest.raises(UserError) as error:
        save_checkpoint(folder, CONFIG, wrong, force=True)
    rewrite(folder, wrong)
    with pytest.raises(UserError) as opening:
        open_checkpoint(folder)
    for text in (str(error.value), str(opening.value)):
        assert "missing encoder.layers.0.feed_forward.up_proj.weight (2, 2)" in text
        assert "unknown encoder.extra (2, 2)" in text
        assert "embedding.weight is (2, 5), expected (5, 2)" in text


def test_weights_that_are_no_floats_are_refused(folder):
    rewrite(folder, {name: array.astype(np.int32) for name, array in weights().items()})
    with pytest.raises(UserError, match="is I32; weights must be BF16, F16, F32, F64"):
        open_checkpoint(folder)


def test_an_unknown_key_in_the_config_is_refused(folder):
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "manifest.json").unlink()
    (folder / "config.json").write_text(json.dumps({**values, "drop_out": 0.1}))
    with pytest.raises(UserError, match=r"config\.json: .*unknown key 'drop_out' \(did you mean 'dropout'\?\)"):
        open_checkpoint(folder)


def test_paths_of_the_wrong_kind(tmp_path, folder):
    (tmp_path / "file").write_text("x")
    onnx = tmp_path / "exported" / "onnx"
    onnx.mkdir(parents=True)
    (onnx / "model.onnx").write_bytes(b"")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "run" / "checkpoints" / "step-00000008")
    for name, message in {
        "nowhere": "no such folder",
        "file": "is a file",
        "exported": "is an ONNX model, and here a checkpoint is needed",
        "run": "no model yet; its newest checkpoint is .*step-00000008",
        "": "not a checkpoint folder",
    }.items():
        with pytest.raises(UserError, match=message):
            open_checkpoint(tmp_path / name)


def test_digests_of_any_folder(tmp_path):
    (tmp_path / "a").write_text("x")
    checkpoint.write_manifest(tmp_path)
    verify_files(tmp_path)
    (tmp_path / "a").write_text("y")
    with pytest.raises(UserError, match="its SHA-256 differs"):
        verify_files(tmp_path)


def test_tensors_are_written_as_safetensors_writes_them(tmp_path):
    """Every type, extents of none, one and several, a name beyond ASCII: byte by byte."""
    values = np.arange(12) % 2
    shapes = [(), (0, 3), (5,), (3, 4)]
    arrays = {
        f"é.{name}.{len(s)}": values[: math.prod(s)].reshape(s).astype(TYPES[name]) for name in TYPES for s in shapes
    }
    for metadata in (None, {"format": "pt"}):
        save_file(arrays, tmp_path / "theirs", metadata)
        write_tensors(tmp_path / "ours", arrays, metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for name, array in read_tensors(tmp_path / "ours").items():
        expected = arrays[name]
        assert (array.dtype, array.shape, array.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
