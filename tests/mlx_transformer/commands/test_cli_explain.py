"""The command line of `explain`."""

from __future__ import annotations

import json
import re

import pytest
from command_line import both_models, caller, refused
from explained_models import data_of

from mlx_transformer.commands import looking

made = pytest.fixture(scope="module")(both_models)
call = pytest.fixture(caller)


def test_explain_writes_a_page(call, made, tmp_path):
    page = tmp_path / "deep" / "page.html"
    options = ["--beam", 2, "--top-k", 3, "--max-new-tokens", 6, "--length-penalty", 0.2, "--no-verify"]
    status, out, said = call("explain", made / "model", "one two", *options, "--with", made / "onnx", "--out", page)
    assert (status, said) == (0, "")
    assert out.startswith(f"{page}: 0.")
    data = data_of(page)
    assert data["runtimes"] == ["model: MLX, CPU", "onnx: ONNX Runtime, CPU"]
    assert data["beam"] is not None
    assert len(data["written"]) <= 6
    assert all(len(step["ids"]) == 3 for step in data["steps"]["of"][1])
    again = call(
        "explain", made / "onnx", "one", "--out", page, "--force", "--runtime", "onnxruntime:cpu", "--threads", 1
    )
    assert again[0] == 0
    assert data_of(page)["text"] == "one"


def test_without_a_model_the_three_that_ship_are_explained(call, tmp_path):
    page = tmp_path / "page.html"
    assert call("explain", "--out", page) == (0, f"{page}: {page.stat().st_size / 1e6:.2f} MB\n", "")
    shown = json.loads(re.search(r'id="walk-data">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)[1])
    assert [model["config"]["architecture"] for model in shown["models"]] == ["encoder-decoder", "decoder", "encoder"]
    assert page.stat().st_size < 1_900_000
    refused(call("explain", "--beam", 2, "--out", page, "--force"), "name a model and a sentence")
    refused(call("explain", "--out", page), "--force to replace it")


def test_explain_refuses_in_one_line(call, made, tmp_path):
    page = ["--out", tmp_path / "page.html"]
    refused(call("explain", made / "onnx", "one", "two", *page), "one sentence in quotes")
    refused(call("explain", made / "onnx", "one", *page, "--beam", 0), "--beam")
    refused(call("explain", made / "onnx", "one", *page, "--translation", "two", "--beam", 3), "--translation")
    refused(call("explain", tmp_path / "none", "one", *page), "no such folder")
    refused(call("explain", made / "onnx", *page), "none is given")
    (tmp_path / "page.html").write_text("mine")
    refused(call("explain", made / "onnx", "one", *page, "--force"), "holds no page of explain")


def test_claims_are_computed_in_a_clone(call, tmp_path, monkeypatch):
    status, out, said = call("claims", "7", "23")
    assert (status, said) == (0, "")
    assert re.findall(r"^ ?(\d+)  \w", out, re.MULTILINE) == ["7", "23"]
    refused(call("claims", "99"), "99")
    page, folder = tmp_path / "deep" / "page.html", tmp_path / "figures"
    assert call("claims", "10", "--out", page, "--figures", folder)[0] == 0
    assert page.is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["10-dot-products.png", "10-dot-products.svg"]
    refused(call("claims", "10", "--out", page), "--force")
    assert call("claims", "10", "--out", page, "--force")[0] == 0
    refused(call("claims", "36", "--model", tmp_path / "none"), "no such folder")
    refused(call("claims", "30", "--model", tmp_path / "none", "--sentence", "one"), "no such folder")
    monkeypatch.setattr(looking, "DOCS", tmp_path)  # as in site-packages
    refused(call("claims", "7"), "not installed with the package, only in docs/claims", "run this in a clone")


def test_other_options_of_claims_are_theirs_alone(call, made):
    refused(call("explain", made / "onnx", "one", "--sentence", "two"), "No such option", "--sentence")
