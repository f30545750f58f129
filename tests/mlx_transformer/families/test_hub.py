"""Models by their names on the Hub: from a Hub on this machine, from its cache, and where there is neither."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch_archives
from hub_server import COMMIT, hub
from safetensors.numpy import load_file
from waiting import PATIENCE

from mlx_transformer.families.hub import find_model, is_name, needed
from mlx_transformer.system.errors import UserError

MARIAN = Path(__file__).parent / "golden" / "marian"


def run(code: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: the Hub's library reads its settings once."""
    given = {**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=given, timeout=PATIENCE)


IMPORT = "import sys; from mlx_transformer.__main__ import main; sys.argv[0] = 'x'; sys.exit(main())"
LOAD = "import sys, mlx_transformer as mt; print(mt.load(sys.argv[1])[0].generate([[5, 17, 0]], max_new_tokens=4))"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The tiny Marian beside what no import needs: code, another framework's weights, a folder of another model's."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(MARIAN, folder, dirs_exist_ok=True)
    torch_archives.save(folder / "pytorch_model.bin", load_file(MARIAN / "model.safetensors"))
    for name in ("modeling_marian.py", "tf_model.h5", "README.md"):
        (folder / name).write_text("raise SystemExit('run')")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_text("another")
    return folder


def test_names_are_fetched_once_and_found_again_offline(repository, tmp_path):
    with hub({"org/tiny": repository}) as (address, asked):
        done = run(IMPORT, tmp_path, "import", "org/tiny", "--out", "ours", HF_ENDPOINT=address)
        assert done.returncode == 0, done.stderr
        assert sorted(asked) == ["config.json", "generation_config.json", "model.safetensors"]
        again = run(IMPORT, tmp_path, "import", "org/tiny", "again", "--revision", COMMIT, HF_ENDPOINT=address)
        assert again.returncode == 0, again.stderr
        assert len(asked) == 3
        loaded = run(LOAD, tmp_path, "org/tiny", HF_ENDPOINT=address)
        wrong = run(IMPORT, tmp_path, "import", "org/other", "--out", "x", HF_ENDPOINT=address)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
        assert "org/other: no such folder, and no model that you may read on the Hugging Face Hub" in wrong.stderr
        wrong = run(IMPORT, tmp_path, "import", "org/tiny", "x", "--revision", "v7", HF_ENDPOINT=address)
        assert "org/tiny: has no revision 'v7'" in wrong.stderr
    origin = json.loads((tmp_path / "ours" / "origin.json").read_text())
    assert origin == {"repository": "org/tiny", "revision": COMMIT}
    assert '\nbase_model: "org/tiny"\n' in (tmp_path / "ours" / "README.md").read_text()
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": address}):  # where nobody answers any more
        offline = run(LOAD, tmp_path, "org/tiny", **environment)
        assert offline.returncode == 0, offline.stderr
        assert offline.stdout == loaded.stdout
        assert loaded.stdout.startswith("[[")
        missing = run(IMPORT, tmp_path, "import", "org/other", "--out", "x", **environment)
        assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
        assert "org/other: no such folder, and not in the cache of the Hugging Face Hub" in missing.stderr
    assert not (tmp_path / "x").exists()


def test_a_folder_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MARIAN, tmp_path / "org" / "tiny")
    assert find_model("org/tiny") == (Path("org/tiny"), None, None)
    assert find_model("org/tiny").origin == {}
    with pytest.raises(UserError, match="org/tiny: is no name on the Hub, which alone has revisions: leave it out"):
        find_model("org/tiny", "main")


def test_without_the_library_the_message_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"org/tiny: no such folder; .* pip install 'mlx-transformer\[hub\]'"):
        find_model("org/tiny")


@pytest.mark.parametrize("name", "tiny a/b/c /org/tiny org/ ./tiny ../tiny org/.. org/t@iny ~/x".split())
def test_what_is_no_name_is_a_path(name):
    assert not is_name(name)
    assert find_model(name).folder == Path(name)


def test_only_what_a_model_needs_is_chosen():
    files = [
        "config.json",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        "tokenizer.json",
        "x.py",
        ".gitattributes",
    ]
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert needed([*files, *shards, "onnx/config.json"]) == [
        *("config.json", "tokenizer.json", "model.safetensors.index.json"),
        *shards,
    ]
    assert needed(files[:2]) == files[:2]
    assert needed(["model.safetensors", "sub/config.json"]) == []
