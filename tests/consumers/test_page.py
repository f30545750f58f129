"""The page's own modules in Node: its searches, with all that a model may say of generation and over a decoder of
SSRUs, whose state has no positions, write the tokens of our runtime; its tokenizer gives the ids of Python's, of every
kind of published vocabulary."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import HERE
from golden_tokens import FOLDERS, golden, has_decoder
from hard_text import code_points
from published_folders import KINDS, checkpoint
from published_text import lines
from random_models import write_model

from export import OnnxTransformer
from export.interface import GRAPHS
from export.runtime.folder import open_folder
from export.web.models import STEPS, facts_of
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.shortlist import Shortlist, shortlist_bytes
from mlx_transformer.text.tokenizer import Tokenizer

pytestmark = pytest.mark.consumers

PAGE = Path(__file__).parents[2] / "export" / "web" / "page"
BEAM = 3
SIZES: dict[str, Any] = dict(vocab_size=31, d_model=16, heads=4, d_ff=24, encoder_layers=1, decoder_layers=2)
SSRU: dict[str, Any] = dict(decoder_self_attention="ssru", positions="sinusoidal_concat")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limits": dict(max_length_factor=1.6, min_new_tokens=5),
    "most": dict(max_new_tokens=6, forced_end=True),
    "forced": dict(forced_first=[7, 9], suppressed_first=[11, 12, 13], suppressed=[20, 21, 4]),
    "ends": dict(end_ids=[*range(5, 31, 2)], min_new_tokens=2, early_stopping=True),
    "repeats": dict(no_repeat_ngram=2, repetition_penalty=1.3, penalty_form="length", heuristic_stop=True),
    "banned": dict(banned_sequences=[[4, 5], [22, 23, 24], [3, 3], [9, 9]], no_repeat_ngram=1),
    "begun": dict(start_id=9, no_repeat_ngram=2),
    "listed": dict(candidates=[4, 5, 8, 14, 21, 22, 29]),
}


def asked(script: str, folder: Path, task: Any) -> Any:
    """The answer of a script in Node, which imports the page's modules."""
    shutil.copytree(PAGE, folder / "page")
    (folder / "page" / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    arguments = [str(folder / name) for name in ("page", "task.json", "answer.json")]
    done = subprocess.run(["node", str(HERE / "node" / script), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answer.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["attention", "ssru"])
def test_the_page_searches_as_our_runtime(kind: str, tmp_path: Path) -> None:
    config = TransformerConfig(**SIZES, max_positions=24, **(SSRU if kind == "ssru" else {}))
    _, folder = write_model(config, tmp_path, target="web")
    rows = [row.tolist() for row in np.random.default_rng(0).integers(3, 31, (4, 7))]
    ports = {name: GRAPHS[graph](open_folder(folder).request) for name, graph in STEPS.items()}
    task = {
        "graphs": {name: str(folder / "onnx" / f"{graph}.onnx") for name, graph in STEPS.items()},
        "names": {name: {"inputs": p.input_names, "outputs": p.output_names} for name, p in ports.items()},
        "configs": {name: configured(config, **settings) for name, settings in SETTINGS.items()},
        "rows": rows,
        "beam": BEAM,
    }
    found, model = asked("with_steps.mjs", tmp_path, task), OnnxTransformer(folder)
    written: dict[str, list[list[int]]] = {}
    for name, settings in SETTINGS.items():
        ends = [config.eos_id, *settings.get("end_ids", [])]
        if "candidates" in settings:
            settings = {"candidates": [settings["candidates"]] * len(rows)}
        written[name] = best(model, rows, **settings)
        for row, expected in zip(found[name]["greedy"], written[name], strict=True):
            assert row[: len(expected)] == expected, name
            assert [id in ends for id in row[len(expected) :]] in ([], [True]), name
        assert found[name]["beam"] == best(model, rows, beam=BEAM, length_penalty=0.6, **settings), name
    assert len({json.dumps(each) for each in written.values()}) == len(SETTINGS), "settings change nothing"


def configured(config: TransformerConfig, candidates: list[int] | None = None, **settings: Any) -> dict[str, Any]:
    """What the page knows of the model, and the ids that its outputs are made of."""
    needed = [config.pad_id, config.bos_id, config.eos_id]
    return {**facts_of(config, settings), "candidates": candidates and [*needed, *candidates]}


def best(model: OnnxTransformer, rows: list[list[int]], **options: Any) -> list[list[int]]:
    return [hypotheses[0].ids for hypotheses in model.search(rows, **options)]


MORE = [
    ">>deu<< one",
    ">>fra<<two",
    ">>eng<< three",
    ">> <",
    ">>",
    "<2de> Germany",
    "中",
    "中 中文",
    "it's 5 o'clock's",
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_cuts_text_as_python_does(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint(kind, tmp_path))
    texts = [*lines()[::2], *MORE, *code_points()[::9]]
    rows = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (600, 12)).tolist()
    found = asked("with_tokenizer.mjs", tmp_path, {"tokenizer": tokenizer.to_json(), "texts": texts, "rows": rows})
    assert found["ids"] == tokenizer.source.encode_batch(texts)
    written = tokenizer.decode_batch(rows)
    assert found["texts"] == written
    assert ["".join(word["text"] for word in words) for words in found["words"]] == written
    assert found["added"] == found["words"]
    assert all([word["at"] for word in words] == sorted({word["at"] for word in words}) for words in found["words"])


@pytest.mark.parametrize("name", [*filter(has_decoder, FOLDERS)])
def test_the_page_finds_tokens_that_a_maker_added(name: str, tmp_path: Path) -> None:
    facts, text, _ = golden(name)
    tokenizer, texts = (
        Tokenizer(text),
        [*facts["texts"], "</s> a <pad>", "<mask> x", "a <extra_id_3> b", "[E1][E1] {NAME}"],
    )
    found = asked("with_tokenizer.mjs", tmp_path, {"tokenizer": text, "texts": texts, "rows": facts["ids"]})
    assert found["ids"] == tokenizer.source.encode_batch(texts)
    assert found["texts"] == facts["decoded"]


@pytest.mark.parametrize("shared", [False, True])
def test_the_page_names_the_candidates_that_python_does(shared: bool, tmp_path: Path) -> None:
    rng, size = np.random.default_rng(2), 300
    lists = [np.sort(rng.choice(size, rng.integers(0, 9), replace=False)) for _ in range(size - 2)]
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.uint64)
    shortlist = Shortlist(31, 8, offsets, np.concatenate(lists).astype(np.uint32))
    (tmp_path / "lex.bin").write_bytes(shortlist_bytes(shortlist))
    rows = [rng.integers(0, size, length).tolist() for length in (1, 2, 3, 5, 8, 13, 300)]
    task = {"file": str(tmp_path / "lex.bin"), "shared": shared, "size": size, "rows": rows}
    found = asked("with_shortlist.mjs", tmp_path, task)
    assert found == [shortlist.candidates(row, size, shared).tolist() for row in rows]
