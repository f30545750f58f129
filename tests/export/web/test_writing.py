"""What `web` writes: the page, the models and their digests; and what it refuses, in one line."""

from __future__ import annotations

import base64
import json
import re
import shutil
from hashlib import sha256

import numpy as np
import onnx
import pytest
from chat_models import write_chat_model
from safetensors.numpy import load
from small_models import alone, random_weights
from web_package import write_packages

from export import export_onnx, export_search
from export.__main__ import main
from export.explain.inside import FIRST, inside, known_text
from export.interface import SETTINGS
from export.web import write_site
from export.web.assets import WASM, WEBGPU
from export.web.models import CHAT_FILES, GIVEN, read_models
from export.web.write import SITE, UNLISTED, site_files
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

PRECISIONS = ("float32", "float16", "int8")


@pytest.fixture(scope="module")
def made(text_folder, tmp_path_factory):
    """FOLDER/web, an export for browsers, FOLDER/mine.onnx, the file with the search, FOLDER/node_modules."""
    folder = tmp_path_factory.mktemp("web")
    export_onnx(text_folder / "model", folder / "web", target="web", precision=PRECISIONS, accept_loss=True)
    export_search(text_folder / "model", folder / "mine.onnx", target="cpu", attention=True)
    write_packages(folder / "node_modules")
    return folder


@pytest.fixture(scope="module")
def site(made):
    return write_site([made / "web", made / "mine.onnx"], made / "site", assets=made / "node_modules", title="A & B")


def written(made, out, *paths, **options):
    return write_site([made / path for path in paths or ["web"]], out, assets=made / "node_modules", **options)


def test_every_file_is_listed_with_its_size_and_digest(site):
    facts = json.loads((site / SITE).read_text(encoding="utf-8"))
    there = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert facts["files"].keys() == there - set(UNLISTED)
    for path, entry in facts["files"].items():
        data = (site / path).read_bytes()
        assert entry == {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    assert site_files(site).keys() == facts["files"].keys()


def test_models_are_those_of_the_folder_and_the_file(site, made):
    facts = json.loads((site / SITE).read_text(encoding="utf-8"))
    assert [model["name"] for model in facts["models"]] == [*PRECISIONS, "float32, search inside"]
    assert [model["kind"] for model in facts["models"]] == ["steps", "steps", "steps", "search"]
    assert [model["webgpu"] for model in facts["models"]] == [True, True, False, False]
    assert [model["float16"] for model in facts["models"]] == [False, True, False, False]
    assert [model["attention"] for model in facts["models"]] == [False, False, False, True]
    for model in facts["models"]:
        paths = [p for g in model["graphs"].values() for p in (g["graph"], *(data["file"] for data in g["data"]))]
        assert model["bytes"] == sum(facts["files"][path]["bytes"] for path in paths)
    steps = facts["models"][0]["graphs"]
    for name, graph in {"encoder": "encoder_model", "decoder": "decoder_model_merged"}.items():
        assert (site / steps[name]["graph"]).read_bytes() == (made / "web/onnx" / f"{graph}.onnx").read_bytes()
    assert facts["title"] == "A & B"
    assert facts["onnxruntime_web"] == "9.8.7"
    assert (site / "tokenizer.json").read_text(encoding="utf-8") == (made / "web/tokenizer.json").read_text(
        encoding="utf-8"
    )


def test_settings_that_the_page_gives_are_inputs_that_have_to_be_given(site, made):
    """onnxruntime-web takes no others: what `search.js` gives is what the graph has, the rest stays in the file."""
    [path] = (site / "models/float32-search-inside").iterdir()
    written, file = onnx.load(path), onnx.load(made / "mine.onnx")
    script = (site / "search.js").read_text(encoding="utf-8")
    call = script.split("this.#run({")[1].split("});")[0]
    given = set(re.findall(r"^ {6}(\w+): ", call, re.M))
    assert {value.name for value in file.graph.input} - {
        value.name for value in written.graph.input
    } == SETTINGS.keys() - GIVEN
    assert given == {"source_ids", "source_mask", *GIVEN}
    assert not {tensor.name for tensor in written.graph.initializer} & given
    assert written.graph.node == file.graph.node
    assert {tensor.name for tensor in written.graph.initializer} >= SETTINGS.keys() - GIVEN


def test_service_worker_lists_the_files_and_keeps_the_page_at_once(site):
    lines = (site / "service_worker.js").read_text(encoding="utf-8").splitlines()
    files, shell = (json.loads(re.fullmatch(r"const \w+ = (.*);", line)[1]) for line in lines[:2])
    digests = {path: digest[:16] for path, digest in site_files(site).items()}
    assert files == {**digests, SITE: sha256((site / SITE).read_bytes()).hexdigest()[:16]}
    assert set(shell) == {path for path in files if "/" not in path}
    assert {"index.html", "app.js", "style.css", "tokenizer.json", SITE} <= set(shell)


def test_page_asks_for_nothing_elsewhere(site):
    for path in site.iterdir():
        if path.suffix in (".html", ".css", ".js", ".webmanifest"):
            urls = re.findall(
                r"(?:https?:)?//[\w.-]+\.\w+",
                re.sub(r"^\s*(//|\*).*$", "", path.read_text(encoding="utf-8"), flags=re.M),
            )
            assert urls == [], path.name
    manifest = json.loads((site / "manifest.webmanifest").read_text(encoding="utf-8"))
    assert (manifest["name"], manifest["start_url"]) == ("A & B", "./")
    assert all((site / icon["src"]).is_file() for icon in manifest["icons"])


def test_modules_of_the_page_are_there(site):
    for path in site.glob("*.js"):
        for name in re.findall(r"(?:from|URL\()\s*'(?:\./)?([\w.]+\.js)'", path.read_text(encoding="utf-8")):
            assert (site / name).is_file(), f"{path.name} imports {name}"


def test_webgpu_is_left_out_where_no_model_runs_on_it(made, tmp_path):
    written(made, tmp_path / "site", "mine.onnx")
    assert {path.name for path in (tmp_path / "site/ort").iterdir()} == set(WASM)
    written(made, tmp_path / "both")
    assert {path.name for path in (tmp_path / "both/ort").iterdir()} == {*WASM, *WEBGPU}
    assert json.loads((tmp_path / "site" / SITE).read_text(encoding="utf-8"))["title"] == "mine"


def test_folders_of_target_portable_share_their_data_file(text_folder, made, tmp_path):
    site = write_site(text_folder / "onnx", tmp_path / "site", assets=made / "node_modules")
    [model] = json.loads((site / SITE).read_text(encoding="utf-8"))["models"]
    assert {data["file"] for graph in model["graphs"].values() for data in graph["data"]} == {
        "models/float32/model.onnx_data"
    }
    assert len(list((site / "models/float32").iterdir())) == 3


def test_nothing_of_another_kind_is_replaced(made, tmp_path):
    out = tmp_path / "site"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="holds files that are no site"):
        written(made, out, force=True)
    assert [path.name for path in out.iterdir()] == ["letter.txt"]
    with pytest.raises(UserError, match="holds the folder that is read"):
        written(made, made, force=True)
    package = made / "node_modules/onnxruntime-web"
    with pytest.raises(UserError, match="lie inside"):
        written(made, package / "site")
    assert not (package / "site").exists()


def test_another_site_is_replaced_by_force_alone(made, tmp_path):
    out = written(made, tmp_path / "site")
    before = site_files(out)
    with pytest.raises(UserError, match=r"holds another site; .*--force"):
        written(made, out, "mine.onnx")
    assert site_files(out) == before
    written(made, out, "mine.onnx", force=True)
    assert "models/float32-search-inside/mine.onnx" in site_files(out)


def test_what_a_page_cannot_run_is_refused(text_folder, made, tmp_path):
    def refused(message, *paths, **options):
        with pytest.raises(UserError, match=message) as found:
            write_site(paths, tmp_path / "site", **{"assets": made / "node_modules", **options})
        assert "\n" not in str(found.value)
        assert not (tmp_path / "site").exists()

    refused("a site needs a model")
    refused("no such folder", tmp_path / "absent")
    refused("is a checkpoint, and here an ONNX folder", text_folder / "model")
    refused("two models are called 'float32'", made / "web", text_folder / "onnx")
    refused("holds no onnxruntime-web", made / "web", assets=tmp_path)
    export_onnx(text_folder / "model", tmp_path / "cpu", target="cpu")
    refused("needs encoder_model.onnx and decoder_model_merged.onnx: export it with --target web", tmp_path / "cpu")
    for architecture in ("decoder", "encoder"):
        config = alone("paper", architecture)
        save_checkpoint(tmp_path / "model", config, random_weights(config), force=True)
        export_onnx(tmp_path / "model", tmp_path / architecture)
        refused("has no tokenizer.json", tmp_path / architecture)
        shutil.copy(made / "web/tokenizer.json", tmp_path / architecture)
        if architecture == "encoder":
            refused("architecture='encoder': a page translates or chats", tmp_path / architecture)
    refused("a site translates or chats, not both", made / "web", tmp_path / "decoder")
    model = onnx.load(made / "mine.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    refused("has no search inside", tmp_path / "foreign.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    refused("cannot be read as an ONNX model", tmp_path / "broken.onnx")


def test_a_decoder_gets_a_page_that_chats(made, tmp_path):
    folder = write_chat_model(tmp_path, "qwen2") / "web"
    export_onnx(tmp_path / "model", folder, target="web", precision=("float32", "int8"), accept_loss=True)
    site = write_site(folder, tmp_path / "site", assets=made / "node_modules")
    facts = json.loads((site / SITE).read_text(encoding="utf-8"))
    assert [(model["kind"], model["dtype"], model["webgpu"]) for model in facts["models"]] == [
        ("chat", "fp32", True),
        ("chat", "q8", False),
    ]
    assert facts["config"]["templates"]
    assert "<|im_end|>" in facts["config"]["control_tokens"]
    assert (facts["transformers"], facts["onnxruntime_web"]) == ("9.8.7", "9.8.7")
    for model in facts["models"]:
        place = site / model["folder"]
        assert {path.name for path in place.iterdir()} == {*CHAT_FILES, "onnx"}
        for name in CHAT_FILES:
            assert (place / name).read_bytes() == (folder / name).read_bytes()
    assert {path.name for path in (site / "models/int8/onnx").iterdir()} == {
        "model_quantized.onnx",
        "model_quantized.onnx_data",
    }
    assert {path.name for path in (site / "ort").iterdir()} == {*WASM[1:], *WEBGPU[1:], "transformers.min.js"}
    assert site_files(site).keys() == facts["files"].keys()
    test_modules_of_the_page_are_there(site)


def test_files_that_take_text_are_refused(text_folder, tmp_path):
    pytest.importorskip("onnxruntime_extensions", reason="pip install -e '.[text]'")
    export_search(text_folder / "model", tmp_path / "text.onnx", text=True)
    with pytest.raises(UserError, match="takes text, by operators that browsers lack"):
        read_models(tmp_path / "text.onnx")


def test_models_of_other_weights_and_tokenizers_are_refused(text_folder, made, tmp_path):
    shutil.copytree(made / "web", tmp_path / "web")
    values = json.loads((tmp_path / "web/mlx_transformer.json").read_text(encoding="utf-8"))
    values["source"] = {"model.safetensors": {"sha256": "0" * 64}}
    (tmp_path / "web/mlx_transformer.json").write_text(json.dumps(values))
    (tmp_path / "web/manifest.json").unlink()
    with pytest.raises(UserError, match="float32 and float32, search inside are of different weights"):
        write_site([tmp_path / "web", made / "mine.onnx"], tmp_path / "site", assets=made / "node_modules")
    values = json.loads((made / "web/tokenizer.json").read_text(encoding="utf-8"))
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"decoder": {"type": "Fuse"}},
        {"pre_tokenizer": values["pre_tokenizer"]["pretokenizers"][1]},
    ):
        (tmp_path / "web/tokenizer.json").write_text(json.dumps({**values, **change}))
        with pytest.raises(UserError, match="unsupported tokenizer; a page has those that this project trains"):
            read_models(tmp_path / "web")


def test_command(made, tmp_path, capsys):
    arguments = ["web", made / "web", made / "mine.onnx", "--out", tmp_path / "site", "--assets", made / "node_modules"]
    assert main([str(each) for each in arguments]) == 0
    files = len(site_files(tmp_path / "site")) + len(UNLISTED)
    assert re.search(rf"site: {files} files, [\d.]+ MB; see it: python -m export serve --web", capsys.readouterr().out)
    assert main([str(each) for each in arguments]) == 2
    assert "holds another site; choose another folder, or --force to replace it" in capsys.readouterr().err
    assert main([*map(str, arguments), "--force", "--title", "Other"]) == 0
    assert json.loads((tmp_path / "site" / SITE).read_text(encoding="utf-8"))["title"] == "Other"


def test_damage_is_found(made, tmp_path):
    shutil.copytree(made / "web", tmp_path / "web")
    data = tmp_path / "web/onnx/encoder_model.onnx_data"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(UserError, match=r"encoder_model\.onnx_data: damaged"):
        write_site(tmp_path / "web", tmp_path / "site", assets=made / "node_modules")
    site = write_site(tmp_path / "web", tmp_path / "site", assets=made / "node_modules", verify=False)
    (site / "app.js").write_text("changed")
    with pytest.raises(UserError, match=r"app\.js: missing or damaged; write the site again"):
        site_files(site)
    assert "app.js" in site_files(site, verify=False)
    with pytest.raises(UserError, match="is no site; write one"):
        site_files(made)


def test_taps_add_a_page_and_outputs_and_nothing_else(made, tmp_path, site, text_folder):
    """No node, no initializer; the weights stay one file."""
    tapped = written(made, tmp_path / "site", inside=inside)
    facts = json.loads((tapped / SITE).read_text(encoding="utf-8"))
    entry = facts["inside"]
    first = facts["models"][0]
    page = (tapped / "inside.html").read_text(encoding="utf-8")
    assert '"module":"./inside.js"' in page
    beside = re.search(r'"beside":"([^"]*)"', page)
    assert beside is not None
    weights, own = load(base64.b64decode(beside[1])), dict(open_checkpoint(text_folder / "model").tensors())
    assert weights.keys() == own.keys()
    assert all(np.array_equal(weights[name], own[name]) for name in own), "what the page's own engine computes with"
    for name, points in entry["taps"].items():
        plain = onnx.load(tapped / first["graphs"][name]["graph"], load_external_data=False)
        shown = onnx.load(tapped / entry["graphs"][name]["graph"], load_external_data=False)
        assert [each.SerializeToString() for each in plain.graph.node] == [
            each.SerializeToString() for each in shown.graph.node
        ]
        assert entry["graphs"][name]["data"] == first["graphs"][name]["data"]
        outputs = [value.name for value in shown.graph.output]
        assert set(points.values()) <= set(outputs)
        assert points.items() <= entry["names"][name]["outputs"].items()
    every = entry["taps"]["encoder"].keys() | entry["taps"]["decoder"].keys()
    assert {"encoder.layers.0.self_attention.weights", "decoder.layers.0.cross_attention.scores", "logits"} <= every
    assert json.loads((site / SITE).read_text(encoding="utf-8"))["inside"] is None
    assert not (site / "inside.html").exists()


@pytest.mark.parametrize("known", FIRST)
def test_the_page_of_taps_opens_with_a_text_that_the_vocabulary_knows(known):
    assert known_text(Tokenizer.train([f"{known} {n}" for n in range(40)], vocab_size=400)) == known


def test_taps_need_a_model_that_is_searched_step_by_step(made, tmp_path):
    with pytest.raises(UserError, match=r"^--taps needs a folder of export --target web"):
        written(made, tmp_path / "site", "mine.onnx", inside=inside)
    assert not (tmp_path / "site").exists()


def test_lower_precisions_have_no_engine_beside_them(text_folder, tmp_path):
    """Whose weights are those of no graph."""
    export_onnx(text_folder / "model", tmp_path / "web", target="web", precision="int8", accept_loss=True)
    [model] = read_models(tmp_path / "web")
    assert '"beside":"' not in inside([model], "").page
