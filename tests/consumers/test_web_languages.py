"""The page of `web` in headless Chromium, for a model whose sources end with their language and whose decoder begins
with the one to write: with a shortlist and without it tokens are those of our runtime."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cases import HERE, served
from imports import ROOT

from export import export_onnx, export_search
from export.web import write_site
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.shortlist import Shortlist, shortlist_bytes

pytestmark = pytest.mark.consumers

GOLDEN = ROOT / "tests" / "mlx_transformer" / "families" / "golden_texts" / "mbart"
COUNT, NEW = 3, 12


def lists(size: int) -> Shortlist:
    """Of each source token eleven others."""
    ids = np.sort((np.arange(size)[:, None] * 7 + 13 * np.arange(11)) % size, axis=1)
    return Shortlist(40, 11, np.arange(size + 1, dtype=np.uint64) * 11, ids.reshape(-1).astype(np.uint32))


def test_languages_and_candidates(tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "texts.json").read_text(encoding="utf-8"))
    import_huggingface(GOLDEN, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "generation.json").read_text())
    (tmp_path / "model" / "generation.json").write_text(json.dumps({**settings, "max_new_tokens": NEW}))
    (tmp_path / "model" / "manifest.json").unlink()
    model, texts = Transformer.load(tmp_path / "model"), golden["texts"][:COUNT]
    (tmp_path / "lex.bin").write_bytes(shortlist_bytes(lists(model.config.vocab_size)))
    folder = export_onnx(tmp_path / "model", tmp_path / "onnx", target="web")
    file = export_search(tmp_path / "model", tmp_path / "one.onnx")
    options = dict(assets=HERE / "node" / "node_modules", shortlist=tmp_path / "lex.bin")
    site = write_site([folder, file], tmp_path / "site", **options)
    pairs = [(pair["source_language"], pair["target_language"]) for pair in golden["pairs"][:2]]
    names = [entry["name"] for entry in json.loads((site / "site.json").read_text())["models"]]
    task = {"models": names, "texts": texts, "pairs": pairs}
    with served(site) as task["origin"]:
        (tmp_path / "task.json").write_text(json.dumps(task), encoding="utf-8")
        arguments = [str(tmp_path / name) for name in ("task.json", "answer.json")]
        script = ["node", str(HERE / "node" / "with_languages.mjs"), *arguments]
        done = subprocess.run(script, capture_output=True, text=True, timeout=900, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    assert not answer["problems"]
    assert [(each["model"], *each["pair"], each["listed"]) for each in answer["found"]] == [
        (name, *pair, listed) for name in names for pair in pairs for listed in (True, False)
    ]
    rows = model.tokenizer.encode_batch(texts)
    for each in answer["found"]:
        codes = dict(zip(("source_language", "target_language"), each["pair"], strict=True))
        model.use_shortlist(tmp_path / "lex.bin" if each["listed"] else "none")
        assert each["rows"] == model.generate(rows, **codes)
    assert answer["found"][0]["rows"] != answer["found"][1]["rows"]
