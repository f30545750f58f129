"""Models by their names on the Hub: from a Hub on this machine, from its cache, and where there is neither."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

import forked
import published_text
import pytest
import torch_archives
from hub_server import COMMIT, hub, nobody
from huggingface_hub.utils import validate_repo_id
from rich.console import Console
from safetensors.numpy import load_file
from waiting import PATIENCE

from export import OnnxTransformer, export_onnx
from export.explain.command import explain
from export.package.plan import describe_graphs
from export.validate import compare
from mlx_transformer import Transformer, load, open_model
from mlx_transformer.commands import info
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.folders import IMPORTED, Place, fingerprint
from mlx_transformer.families.conversion import IMAGE_MODELS
from mlx_transformer.families.folder import needed
from mlx_transformer.families.hub import find_model
from mlx_transformer.families.table import FAMILIES
from mlx_transformer.system.errors import UserError

MARIAN = Path(__file__).parent / "golden" / "marian"
IDS = [[5, 17, 0]]
IMPORT = "mlx-transformer import"


def run(code: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: the Hub's library reads its settings once."""
    given = {**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", code, *arguments]
    return forked.run(command, cwd=folder, env=given, timeout=PATIENCE)


SEVERAL = """
import contextlib, io, json, sys
import mlx_transformer
from mlx_transformer.cli import main

for command, *arguments in json.loads(sys.argv[1]):
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if command == "load":
            print(mlx_transformer.load(*arguments)[0].generate([[5, 17, 0]], max_new_tokens=4))
        else:
            try:
                main([command, *arguments])
            except SystemExit as done:
                status = done.code or 0
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


CHECK = """
import sys
from pathlib import Path
from export.serve.opening import check
from export.settings import ServeSettings
from mlx_transformer import open_model

check(Path(sys.argv[1]), ServeSettings(), open_model)
check(Path(sys.argv[1]), ServeSettings(workers=2), open_model)
"""
"""What `serve` looks at first: all but a second worker is right for MLX."""


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


def ended(commands: list[str], folder: Path, **environment: str) -> list[tuple[int, str, str]]:
    """(status, standard output, standard error) of commands that one process runs; load: what a model generates."""
    done = run(SEVERAL, folder, json.dumps([command.split() for command in commands]), **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(commands)
    return found


def test_names_are_fetched_once_and_found_again_offline(repository, tmp_path):
    with hub({"org/tiny": repository}) as (address, asked):
        imports = ["import org/tiny --out ours", f"import org/tiny again --revision {COMMIT}"]
        for status, _, said in ended(imports, tmp_path, HF_ENDPOINT=address):
            assert status == 0, said
        assert sorted(asked) == ["config.json", "generation_config.json", "model.safetensors"]
        found = ["load org/tiny", "import org/other --out x", "import org/tiny x --revision v7"]
        loaded, other, revision = ended(found, tmp_path, HF_ENDPOINT=address)
        assert loaded[0] == 0
        assert loaded[1].startswith("[[")
        assert (other[0], other[2].count("\n")) == (2, 1)
        assert "org/other: no such folder, and no model that you may read on the Hugging Face Hub" in other[2]
        assert "org/tiny: has no revision 'v7'" in revision[2]
    origin = json.loads((tmp_path / "ours" / "origin.json").read_text())
    assert origin == {"repository": "org/tiny", "revision": COMMIT}
    assert '\nbase_model: "org/tiny"\n' in (tmp_path / "ours" / "README.md").read_text()
    with nobody() as address:
        for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": address}):
            offline, missing = ended(["load org/tiny", "import org/other --out x"], tmp_path, **environment)
            assert offline == loaded
            assert (missing[0], missing[2].count("\n")) == (2, 1)
            assert "org/other: no such folder, and not in the cache of the Hugging Face Hub" in missing[2]
    assert not (tmp_path / "x").exists()


def test_a_cache_that_leads_elsewhere_is_one_line(tmp_path):
    place = tmp_path / "hub" / "hub" / "models--org--tiny"
    shutil.copytree(MARIAN, tmp_path / "hub" / "evil")
    for folder in (place / "refs", place / "snapshots"):
        folder.mkdir(parents=True)
    (place / "refs" / "main").write_text("../../../evil")
    ((status, _, said),) = ended(["import org/tiny --out x"], tmp_path, HF_HUB_OFFLINE="1")
    assert (status, said.count("\n")) == (2, 1)
    assert "org/tiny: damaged in the cache of the Hugging Face Hub" in said
    assert not (tmp_path / "x").exists()


def test_an_adapters_base_is_found_in_the_cache(tmp_path):
    place = tmp_path / "hub" / "hub" / "models--org--base"
    shutil.copytree(MARIAN.parent / "t5", place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    for name in ("base", "lost"):
        shutil.copytree(MARIAN.parents[1] / "golden_peft" / "lora", tmp_path / name)
        file = tmp_path / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": f"org/{name}"}))
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub" / "hub"), "HF_HUB_OFFLINE": "1"}
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_HOME": str(tmp_path), **cache}):
        (status, said, _), missing = ended(["import base out --force", "import lost x"], tmp_path, **environment)
        assert status == 0
        assert f"merged into {place / 'snapshots' / COMMIT}" in said
        assert (missing[0], missing[2].count("\n")) == (2, 1)
        assert (
            f"its base is org/lost: no such folder, and not in the cache of the Hugging Face Hub, {place.parent}"
            in missing[2]
        )


def test_a_folder_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MARIAN, tmp_path / "org" / "tiny")
    assert find_model("org/tiny") == (Path("org/tiny"), None, None)
    assert find_model("org/tiny").origin == {}
    with pytest.raises(UserError, match="org/tiny: is no name on the Hub, which alone has revisions: leave it out"):
        find_model("org/tiny", "main")


def test_a_published_folder_is_opened_as_one_on_the_hub_is(tmp_path):
    """With its weights in any form, and with graphs of others beside them, such as many have."""
    import_huggingface(MARIAN, tmp_path / "ours")
    expected = load(tmp_path / "ours")[0].generate(IDS)
    shutil.copytree(MARIAN, tmp_path / "graphs")
    (tmp_path / "graphs" / "onnx").mkdir()
    (tmp_path / "graphs" / "onnx" / "decoder_model_quantized.onnx").write_bytes(b"another's")
    shutil.copytree(MARIAN, tmp_path / "torch")
    torch_archives.save(tmp_path / "torch" / "pytorch_model.bin", load_file(MARIAN / "model.safetensors"))
    (tmp_path / "torch" / "model.safetensors").unlink()
    for folder in (MARIAN, tmp_path / "graphs", tmp_path / "torch"):
        assert load(folder)[0].generate(IDS) == expected
        assert open_model(folder, runtime="mlx").where == str(folder)
        with pytest.raises(UserError, match="threads is for ONNX folders"):
            open_model(folder, threads=1)
        assert fingerprint(folder) == fingerprint(folder)
    (tmp_path / "torch" / "pytorch_model.bin").rename(tmp_path / "torch" / "tf_model.h5")
    with pytest.raises(UserError, match=r"torch: none of .*; its weights may be in tf_model\.h5; save it by"):
        load(tmp_path / "torch")
    with pytest.raises(UserError, match="both: is an ONNX model, and here a checkpoint is needed"):
        Transformer.load(export_onnx(tmp_path / "ours", tmp_path / "both"))
    with pytest.raises(UserError, match=r"torch: is a published model, and here an ONNX folder is needed"):
        open_model(tmp_path / "torch", runtime="onnx")
    # What was exported is that, whatever lies beside it.
    exported = tmp_path / "both"
    shutil.copyfile(MARIAN / "model.safetensors", exported / "model.safetensors")
    assert isinstance(load(exported)[0], OnnxTransformer)
    # And one that Optimum wrote in the folder of the weights is for those who ask for it.
    for name in ("mlx_transformer.json", "manifest.json"):
        (exported / name).unlink()
    assert isinstance(load(exported)[0], Transformer)
    assert isinstance(open_model(exported, runtime="onnx"), OnnxTransformer)


@pytest.fixture
def t5(tmp_path):
    """A published folder with text."""
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    own = published_text.trained(published_text.two_languages()[0], size=300, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return published_text.write_model(
        tmp_path / "theirs",
        {"model_type": "t5", **published_text.T5, **ids, "vocab_size": 420},
        spiece__model=own,
        tokenizer_config__json={"extra_ids": 100, "pad_token": "<pad>"},
    )


@pytest.mark.slow
def test_what_looks_at_models_takes_a_published_folder(t5, tmp_path):
    """`validate` and `explain` make a checkpoint of it for as long, of which nothing is left."""
    import_huggingface(t5, tmp_path / "ours")
    package, before = export_onnx(tmp_path / "ours", tmp_path / "onnx"), fingerprint(t5)
    report = compare(t5, package, ["onnxruntime"], 3, longest=9, searches=False)
    assert (report.equal, report.checkpoint) == (True, str(t5))
    page = tmp_path / "page.html"
    assert explain(t5, ["one two"], out=page, max_new_tokens=2).startswith(str(page))
    assert '"model":"theirs"' in page.read_text(encoding="utf-8").replace(": ", ":")
    text = StringIO()
    Console(file=text, width=200).print(info.describe(t5, describe_graphs))
    assert all(told in text.getvalue() for told in ("published model", "relative", "spiece.model"))
    assert fingerprint(t5) == before


@pytest.mark.slow
@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_commands_take_a_published_folder_and_a_name(t5, compared, tmp_path):
    """Whatever runs models: `translate --resume` digests it, `compare` opens it anew in a process of its own."""
    (tmp_path / "text").write_text("one two\nthree\n")
    settings = "-i text --max-new-tokens 4"
    commands = [f"translate {name} {settings} -o {out}" for name, out in (("theirs", "a"), ("org/t5", "b --resume"))]
    commands += ["evaluate theirs --source text --reference text"]
    if compared:
        commands += ["compare org/t5 theirs --source text --max-new-tokens 4 --json c.json --out c.html"]
    with hub({"org/t5": t5}) as (address, _):
        ended_with = ended(commands, tmp_path, HF_ENDPOINT=address)
        serving = run(CHECK, tmp_path, "org/t5", HF_ENDPOINT=address)
    assert [status for status, *_ in ended_with] == [0] * len(commands), ended_with
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != b""
    assert not compared or "0 of 2 lines differ" in ended_with[-1][1], (tmp_path / "c.json").read_text()
    assert "a checkpoint, and MLX computes one batch at a time" in serving.stderr.splitlines()[-1]


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_what_needs_a_checkpoint_says_how_to_make_one(weights, tmp_path):
    folder = tmp_path / "their model"
    shutil.copytree(MARIAN, folder)
    (folder / "model.safetensors").rename(folder / weights)
    for needs in (open_checkpoint, lambda path: export_onnx(path, tmp_path / "out")):
        with pytest.raises(UserError) as error:
            needs(folder)
        assert f"is a published model, and here a checkpoint is needed; make one of it: {IMPORT}" in str(error.value)
        assert f"import '{folder}' OUT" in str(error.value)


def test_a_family_that_is_not_read_is_not_advised_to_be_imported(tmp_path):
    assert {*IMPORTED} == {*FAMILIES, *IMAGE_MODELS}
    folder = shutil.copytree(MARIAN, tmp_path / "theirs")
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    for needs in (open_checkpoint, lambda path: export_onnx(path, tmp_path / "out")):
        with pytest.raises(UserError, match="model_type 'mamba' can't be imported; these can: bart, ") as error:
            needs(folder)
        assert IMPORT not in str(error.value)


def test_a_link_out_of_the_cache_is_one_line(repository, tmp_path):
    """What it leads to would be copied into a checkpoint, and from there to the Hub."""
    with hub({"org/tiny": repository}) as (address, _):
        assert ended(["import org/tiny --out ours"], tmp_path, HF_ENDPOINT=address)[0][0] == 0
    snapshot = tmp_path / "hub" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    (tmp_path / "secret").write_text("of a stranger")
    for target in (tmp_path / "secret", "generation_config.json", "nothing"):
        (snapshot / "generation_config.json").unlink()
        (snapshot / "generation_config.json").symlink_to(target)
        ((status, _, said),) = ended(["import org/tiny --out x"], tmp_path, HF_HUB_OFFLINE="1")
        assert (status, said.count("\n")) == (2, 1)
        assert "damaged in the cache of the Hugging Face Hub (generation_config.json leads " in said
        assert not (tmp_path / "x").exists()
    os.truncate(snapshot.parents[1] / "refs" / "main", 5_000_000_000)
    ((status, _, said),) = ended(["import org/tiny --out x"], tmp_path, HF_HUB_OFFLINE="1")
    assert (status, said.count("\n")) == (2, 1)
    assert "its reference main is no commit" in said


def test_without_the_library_the_message_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"org/tiny: no such folder; .* pip install .*\[hub\]'"):
        find_model("org/tiny")


REFUSED = "tiny a/b/c /org/tiny org/ ./tiny ../tiny org/.. org/t@iny ~/x org/t--y org/t..y org/t.git org/t. org/t- -o/t"
TAKEN = "org/tiny o/t Org-1/t_2.b 1/2 org/_t a.b/c-d o_o/t.gi"


@pytest.mark.parametrize("name", [*REFUSED.split(), "örg/t", "org/tö"])
def test_what_is_no_name_is_a_path(name):
    assert Place.of(name).what != "a name on the Hub"
    assert find_model(name).folder == Path(name)


@pytest.mark.parametrize("name", [*REFUSED.split()[1:], *TAKEN.split()])
def test_names_are_those_that_the_hub_takes(name):
    try:
        validate_repo_id(name)
    except ValueError:
        assert Place.of(name).what != "a name on the Hub"
    else:
        assert Place.of(name).what == "a name on the Hub"


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
    onnx = ["config.json", "mlx_transformer.json", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/manifest.json"]
    assert needed([*onnx, "onnx/run.py", "README.md"]) == onnx
    listed = ["genai_config.json", "shortlist.bin"]
    weights = ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"]
    assert needed([*onnx[:2], *listed, *weights, *onnx[2:]]) == [*onnx[:2], *listed, *onnx[2:]]
