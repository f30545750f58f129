"""Folders sent to a Hub on this machine: what is sent, only what is asked for, and what is refused."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from adapter_models import made
from hub_server import COMMIT, TOKEN, hub, nobody
from marian_models import SIZES
from marian_models import write_model as write_marian
from random_models import write_model
from small_checkpoint import CONFIG, weights
from waiting import PATIENCE

from export.validate.origin.check import recorded
from mlx_transformer.convert import import_huggingface, import_marian, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.families.push import check_repository, push, shipment
from mlx_transformer.system.errors import UserError

CODE = "import sys; from mlx_transformer.__main__ import main; sys.argv[0] = 'x'; sys.exit(main())"
GOLDEN = Path(__file__).parent / "golden"
TINY = TransformerConfig(vocab_size=30, d_model=16, heads=1, d_ff=16, encoder_layers=1, decoder_layers=1)


def run(folder, *arguments, stdin=subprocess.DEVNULL, **environment):
    given = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN, **environment}
    command = [sys.executable, "-c", CODE, "push", *map(str, arguments)]
    return forked.run(command, stdin=stdin, cwd=folder, env=given, timeout=PATIENCE)


def answered(text, folder, *arguments, **environment):
    """With a terminal where somebody has typed."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, text.encode())
        return run(folder, *arguments, stdin=theirs, **environment)
    finally:
        os.close(ours)
        os.close(theirs)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def checkpoint(tmp_path):
    folder = save_checkpoint(tmp_path / "run" / "model", CONFIG, weights())
    (folder / ".DS_Store").write_text("of a Mac")
    return folder


def test_a_run_is_sent_when_it_is_asked_for_and_never_else(checkpoint, tmp_path):
    sent = {name: data for name, data in files(checkpoint).items() if name != ".DS_Store"}
    with hub({}, tmp_path / "hub") as (address, _):
        there = {"HF_ENDPOINT": address}
        done = run(tmp_path, "run", "org/name", **there)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "nothing was sent to org/name: no terminal to ask on; --yes sends without asking" in done.stderr
        for name, data in sent.items():
            assert f"{len(data):,} {name}\n" in done.stdout
        assert ".DS_Store" not in done.stdout
        assert f"{sum(map(len, sent.values())):,} bytes in all, of run/model\n" in done.stdout
        assert "run/model/README.md names no license yet" in done.stdout
        done = answered("n\n", tmp_path, "run", "org/name", **there)
        assert done.returncode == 2
        assert "Send this to org/name on the Hugging Face Hub, public if it is new?" in done.stdout + done.stderr
        assert done.stderr.endswith("nothing was sent to org/name\n")
        assert not (tmp_path / "hub").exists()
        done = answered("y\n", tmp_path, "run", "org/name", **there)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"{address}/org/name/commit/{COMMIT}\n")
        assert files(tmp_path / "hub" / "org" / "name") == sent
        read = [sys.executable, "-c", "import sys, mlx_transformer as mt; print(mt.open_model(sys.argv[1]).config)"]
        home = {**os.environ, "HF_HOME": str(tmp_path / "home"), **there}
        opened = forked.run([*read, "org/name"], env=home, timeout=PATIENCE)
        assert opened.stdout == f"{CONFIG}\n", opened.stderr
        done = run(tmp_path, "run/model", "org/other", "--yes", "--private", **there)
        assert done.returncode == 0, done.stderr
        assert files(tmp_path / "hub" / "org" / "other") == {**sent, "private": b""}


def test_a_wrong_token_and_a_hub_that_nobody_reaches_are_one_line(checkpoint, tmp_path):
    with hub({}, tmp_path / "hub") as (address, _):
        done = run(tmp_path, "run", "org/name", "--yes", HF_ENDPOINT=address, HF_TOKEN="hf_wrong")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "org/name: could not be sent to the Hugging Face Hub (" in done.stderr
        assert done.stderr.endswith("; may the token write there? hf auth login\n")
    with nobody() as address:
        for environment in ({"HF_ENDPOINT": address}, {"HF_HUB_OFFLINE": "1"}):
            done = run(tmp_path, "run", "org/name", "--yes", **environment)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert "org/name: could not be sent to the Hugging Face Hub (" in done.stderr
    done = run(tmp_path, "run", "org/name", "--yes", HF_ENDPOINT=address, HF_TOKEN="")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the Hugging Face Hub wants to know who sends: hf auth login, or a token in HF_TOKEN" in done.stderr


def test_every_kind_of_folder_is_sent_whole(tmp_path):
    checkpoint, onnx = write_model(TINY, tmp_path, 1)
    theirs = to_huggingface(checkpoint, tmp_path / "theirs")
    for folder in (onnx, theirs):
        assert list(shipment(folder).files) == sorted(files(folder))
    made(checkpoint).write(adapter := tmp_path / "adapter")
    assert list(shipment(adapter).files) == ["README.md", "adapter.json", "adapter.safetensors"]
    data = onnx / "onnx" / "model.onnx_data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.onnx_data: damaged"):
        shipment(onnx)
    (adapter / "adapter.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"adapter\.safetensors"):
        shipment(adapter)


def test_where_the_original_lies_here_is_not_sent(tmp_path):
    """Its name is, with which it is found again beside what was fetched."""
    far = tmp_path / "of-a-customer" / "theirs"
    shutil.copytree(GOLDEN / "marian", far)
    marian = write_marian(tmp_path / "of-a-customer" / "marian", SIZES) / "model.npz"
    import_huggingface(far, ours := tmp_path / "models" / "ours")
    import_marian(marian, of_marian := tmp_path / "models" / "of-marian")
    before = files(ours)
    with hub({}, tmp_path / "hub") as (address, _):
        for name, kind, original in ((ours, "transformers", far), (of_marian, "marian", marian)):
            done = run(tmp_path, name, f"org/{name.name}", "--yes", HF_ENDPOINT=address)
            assert done.returncode == 0, done.stderr
            sent = tmp_path / "hub" / "org" / name.name
            assert not any(b"of-a-customer" in data for data in files(sent).values())
            for file, data in files(sent).items():
                assert f"{len(data):,} {file}\n" in done.stdout
            assert open_checkpoint(sent).config == open_checkpoint(name).config  # its manifest is right
            beside = sent.parent / original.name
            (shutil.copytree if original.is_dir() else shutil.copyfile)(original, beside)
            assert recorded(kind, sent) == beside
    assert files(ours) == before


def test_what_is_no_model_is_not_sent(checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "secret.txt").write_text("mine")
    for name, message in (("empty", "not a checkpoint"), ("thesis", "not a checkpoint"), ("none", "no such folder")):
        with pytest.raises(UserError, match=message):
            shipment(tmp_path / name)
    with pytest.raises(UserError, match="is a file"):
        shipment(checkpoint / "config.json")
    shutil.copytree(checkpoint, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="damaged"):
        shipment(tmp_path / "damaged")


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "../x", "org/..", "org/n ame", "https://huggingface.co/org/name", ""]
)
def test_names_that_no_repository_has(name, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(UserError, match="is no name on the Hugging Face Hub: give ORG/NAME"):
        check_repository(name)


def test_without_the_library_the_message_names_the_extra(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"push needs huggingface_hub: pip install .*\[hub\]"):
        push(shipment(Path(checkpoint)), "org/name")


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_links_out_of_the_folder_are_refused_by_name(checkpoint, tmp_path, kind):
    """Nobody expects what they lead to to be sent. Links inside the folder are files like others."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("secret")
    (checkpoint / "card.md").symlink_to("README.md")
    (checkpoint / ".cache").symlink_to(tmp_path / "secrets")  # hidden, and not sent
    assert "card.md" in shipment(checkpoint).files
    target = {"file": tmp_path / "secrets" / "key", "folder": tmp_path / "secrets", "dangling": tmp_path / "none"}[kind]
    (checkpoint / "notes").symlink_to(target)
    with pytest.raises(UserError, match="links lead out of it: notes; "):
        shipment(checkpoint.parent)
