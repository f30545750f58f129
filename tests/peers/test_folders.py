"""Folders of every family as transformers 4 and 5 save them, each with tokens that its maker added: thousands of lines
and the model's numbers, in every runtime, and in the folder that we write for the same version.

`make_golden_tokens.py` makes them, and reads ours, in the environments PEERS_FOUR and PEERS_FIVE; the folders stay in
PEERS_FOLDERS. Each test prints its counts (`pytest -s`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tokenizers
from golden_tokens import FOLDERS, has_decoder
from serving import client

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from export.validate.checks.package_files import token_problems
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer import Transformer
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.text.published_ids import roles_of

pytestmark = pytest.mark.consumers

ROOT = Path(__file__).parents[2]
MAKER = ROOT / "tests" / "mlx_transformer" / "families" / "make_golden_tokens.py"
PYTHONS = {"v4": os.environ.get("PEERS_FOUR", ""), "v5": os.environ.get("PEERS_FIVE", "")}
COUNT = os.environ.get("PEERS_LINES", "2000")
SECONDS = 3600 * 3
TRANSLATED = 60
LANGUAGES = {"nllb": ("eng_Latn", "deu_Latn"), "mbart": ("en_XX", "de_DE"), "m2m100": ("en", "de")}


def judged(version: str, *arguments: str | Path) -> None:
    if not PYTHONS[version]:
        raise RuntimeError("run make test-folders, which installs both versions of transformers")
    command = [PYTHONS[version], str(MAKER), *map(str, arguments)]
    subprocess.run(command, check=True, timeout=SECONDS, env={**os.environ, "HF_HUB_OFFLINE": "1"})


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("PEERS_FOLDERS") or tmp_path_factory.mktemp("folders"))
    for version in PYTHONS:
        judged(version, folder, COUNT)
    return folder


@pytest.fixture(scope="session")
def ours(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder's checkpoint, in `model`, and its package, in `onnx`; made when they are first asked for."""
    out = tmp_path_factory.mktemp("ours")

    @cache
    def made(name: str) -> Path:
        import_huggingface(folders / name, out / name / "model")
        export_onnx(out / name / "model", out / name / "onnx")
        return out / name

    return made


@pytest.fixture(scope="session")
def again(folders: Path, ours: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that we write, with what transformers makes of them."""
    out = tmp_path_factory.mktemp("again")
    for name in FOLDERS:
        to_huggingface(ours(name) / "model", out / name, config_of(folders / name)["model_type"])
    for version in PYTHONS:
        judged(version, out, COUNT, folders)
    return out


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def facts_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "texts.json").read_text(encoding="utf-8"))


def equal(what: str, inputs: list[Any], found: Iterable[Any], expected: Iterable[Any]) -> None:
    each = list(zip(inputs, found, expected, strict=True))
    wrong = [(given, mine, theirs) for given, mine, theirs in each if mine != theirs]
    print(f"{what}: {len(each)} lines, {len(wrong)} differ")
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_and_texts(name: str, folders: Path, ours: Callable[[str], Path]) -> None:
    facts, folder = facts_of(folders / name), ours(name)
    texts, ids = facts["texts"], facts["ids"]
    file = (folder / "onnx" / "tokenizer.json").read_text(encoding="utf-8")
    for runtime, model in (("MLX", Transformer.load(folder / "model")), ("package", OnnxTransformer(folder / "onnx"))):
        equal(f"{name}: ids, {runtime}", texts, model.tokenizer.source.encode_batch(texts), ids)
        equal(f"{name}: texts, {runtime}", ids, model.tokenizer.decode_batch(ids), facts["decoded"])
    if "lookup" not in roles_of(json.loads(file)):
        library = tokenizers.Tokenizer.from_str(file)
        settings = json.loads((folder / "onnx" / "tokenizer_config.json").read_text(encoding="utf-8"))
        library.encode_special_tokens = settings["split_special_tokens"]
        library.no_truncation()
        equal(f"{name}: ids, tokenizers", texts, [each.ids for each in library.encode_batch(texts)], ids)
    assert token_problems(open_checkpoint(folder / "model"), folder / "onnx") == []


def outputs(answers: dict[str, np.ndarray]) -> np.ndarray:
    return answers["logits"] if "logits" in answers else answers["last_hidden_state"]


@pytest.mark.parametrize("name", FOLDERS)
def test_logits(name: str, folders: Path, ours: Callable[[str], Path]) -> None:
    """By the rule of `validate`: in MLX, in ONNX Runtime, and what transformers computes."""
    folder, given = ours(name), dict(np.load(folders / name / "answers.npz"))
    opened = open_checkpoint(folder / "model")
    config, weights, mask = opened.config, dict(opened.tensors()), given["mask"].astype(bool)
    mlx, onnx = Transformer.load(folder / "model"), OnnxTransformer(folder / "onnx", threads=1)
    references = [Reference(config, weights, kind) for kind in (np.float64, np.float32)]
    if config.has_decoder:
        inputs = (given["ids"], given["target"], mask)
        truth = Truth.of(*(reference(*inputs) for reference in references), np.ones(given["target"].shape, bool))
        computed: dict[str, Any] = {"MLX": mlx(*map(mx.array, inputs))}
        computed["ONNX"] = onnx.decode(given["target"], onnx.encode(given["ids"], mask), mask)
    else:
        types = {"token_types": given["types"]} if config.token_types else {}
        truth = Truth.of(*(reference.encode(given["ids"], mask, **types) for reference in references), mask)
        given_mlx = {key: mx.array(value) for key, value in types.items()}
        computed = {"MLX": mlx.encode(mx.array(given["ids"]), mx.array(mask), **given_mlx)}
        computed["ONNX"] = onnx.encode(given["ids"], mask, **types)
    pool, budget = ErrorScale.pooled([truth.scale]), budget_for("float32", "cpu")
    for runtime, values in {"transformers": outputs(given), **computed}.items():
        measured = Measurement.of(Deviation.of(np.array(values), truth), truth.scale, pool, budget)
        print(f"{name}: numbers, {runtime}: {measured}")
        assert measured.passed, (runtime, measured)


TRANSLATORS = [*filter(has_decoder, FOLDERS)]


@pytest.mark.parametrize("name", TRANSLATORS)
def test_the_page(name: str, folders: Path, ours: Callable[[str], Path], tmp_path: Path) -> None:
    facts, tokenizer = facts_of(folders / name), Transformer.load(ours(name) / "model").tokenizer
    shutil.copytree(ROOT / "export" / "web" / "page", tmp_path / "page")
    (tmp_path / "page" / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    task = {"tokenizer": tokenizer.to_json(), "texts": facts["texts"], "rows": facts["ids"], "quick": True}
    (tmp_path / "task.json").write_text(json.dumps(task), encoding="utf-8")
    script = ROOT / "tests" / "consumers" / "node" / "with_tokenizer.mjs"
    places = [str(tmp_path / file) for file in ("page", "task.json", "answer.json")]
    subprocess.run(["node", str(script), *places], check=True, timeout=SECONDS)
    found = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    equal(f"{name}: ids, page", facts["texts"], found["ids"], facts["ids"])
    equal(f"{name}: texts, page", facts["ids"], found["texts"], facts["decoded"])


def spread(texts: list[str]) -> list[str]:
    """Lines that models of 150 positions take whole, of all kinds."""
    short = [text for text in texts if len(text.encode()) < 60 and not {"\n", "\0"} & {*text}]
    return short[:: max(1, len(short) // TRANSLATED)]


@pytest.mark.parametrize("name", TRANSLATORS)
def test_one_file_and_server(name: str, folders: Path, ours: Callable[[str], Path], tmp_path: Path) -> None:
    folder, texts = ours(name), spread(facts_of(folders / name)["texts"])
    languages = dict(zip(("source_language", "target_language"), LANGUAGES.get(name[3:], ()), strict=False))
    options: dict[str, Any] = dict(max_new_tokens=6, **languages)
    model = OnnxTransformer(folder / "onnx", threads=1)
    expected = Transformer.load(folder / "model").translate(texts, **options)
    equal(f"{name}: translations, package", texts, model.translate(texts, **options), expected)
    with client(model, max_queue=1000) as (http, _):
        answer = http.post("/translate", json={"text": texts, **options})
        assert answer.status_code == 200, answer.text
        equal(f"{name}: translations, server", texts, answer.json()["translations"], expected)
    file = SearchModel(export_search(folder / "model", tmp_path / "one.onnx", text=True), threads=1)
    equal(f"{name}: translations, one file", texts, file.translate(texts, **options), expected)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_we_write_is_read_as_theirs(name: str, folders: Path, again: Path) -> None:
    before, after = facts_of(folders / name), facts_of(again / name)
    equal(f"{name}: ids, written", before["texts"], after["ids"], before["ids"])
    equal(f"{name}: texts, written", before["ids"], after["decoded"], before["decoded"])
    assert [after[key] for key in ("special", "language")] == [before[key] for key in ("special", "language")]
    theirs, written = (dict(np.load(folder / name / "answers.npz")) for folder in (folders, again))
    mask = theirs["mask"].astype(bool)
    for key, values in theirs.items():
        found = written[key]
        if key == "last_hidden_state":  # rows for padding aren't read
            values, found = values[mask], found[mask]
        if values.dtype.kind == "f":
            np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-5, err_msg=key)
        else:
            assert np.array_equal(found, values), key
