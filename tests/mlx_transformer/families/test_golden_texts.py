"""Translators whose sources end with their language: ids, tokens and texts are those of `transformers`.

`make_golden_texts.py` beside this makes the folders.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from combined import thinned
from published_folders import left_behind

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from mlx_transformer import Transformer, UserError
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden_texts"
LAST, STARTS = {"source_language_last": True}, {"target_language_starts": True}
KINDS = {"mbart": {**LAST, **STARTS}, "nllb": LAST}
SEARCHES = {"tokens": {}, "beams": dict(beam=4, length_penalty=1.0, penalty_form="length", early_stopping=True)}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / request.param
    assert left_behind(import_huggingface(GOLDEN / request.param, folder)) == []
    return folder


def facts(checkpoint: Path) -> dict:
    return json.loads((GOLDEN / checkpoint.name / "texts.json").read_text(encoding="utf-8"))


def of_pair(pair: dict) -> dict:
    return {name: pair[name] for name in ("source_language", "target_language")}


def test_ids_are_those_of_the_slow_tokenizer(checkpoint):
    model, golden = Transformer.load(checkpoint), facts(checkpoint)
    known, ids = model.generation["languages"], Tokenizer.load(checkpoint).encode_batch(golden["texts"])
    assert {name: model.generation[name] for name in KINDS[checkpoint.name]} == KINDS[checkpoint.name]
    for pair in golden["pairs"]:
        assert pair["ids"] == [[*row, known[pair["source_language"]]] for row in ids]


def opened(checkpoint: Path, runtime: str, folder: Path):
    if runtime == "mlx":
        return Transformer.load(checkpoint)
    if runtime in ("portable", "cpu"):
        return OnnxTransformer(export_onnx(checkpoint, folder / "onnx", target=runtime), threads=1)
    return SearchModel(export_search(checkpoint, folder / "one.onnx", text=runtime == "text"), threads=1)


@pytest.mark.fast("nllb-text", "mbart-cpu")
@pytest.mark.parametrize("runtime", thinned(["mlx", "portable", "cpu", "search", "text"], 2))
def test_tokens_and_texts_are_those_of_transformers(runtime, checkpoint, tmp_path):
    golden, model = facts(checkpoint), opened(checkpoint, runtime, tmp_path)
    texts = golden["texts"]
    rows = Tokenizer.load(checkpoint).encode_batch(texts)
    for pair in golden["pairs"]:
        for name, options in SEARCHES.items():
            asked = dict(**of_pair(pair), max_new_tokens=12, **options)
            if runtime != "text":
                found = model.generate(rows, **asked)
                assert found == [without_end(ids) for ids in pair[name]]
            expected = [text if line.strip() else "" for line, text in zip(texts, pair[f"{name} as text"], strict=True)]
            assert model.translate(texts, **asked) == expected
        if runtime in ("mlx", "cpu"):
            asked = dict(**of_pair(pair), max_new_tokens=12, beam=1)
            assert ["".join(model.stream(text, **asked)) for text in texts[:3]] == pair["tokens as text"][:3]


def without_end(ids: list[int]) -> list[int]:
    """A row of an output, up to its end, without it and what stands behind."""
    return ids[: ids.index(2)] if 2 in ids else ids


def test_the_decoder_begins_with_what_is_asked_for(checkpoint):
    model, golden = Transformer.load(checkpoint), facts(checkpoint)
    rows, pair = golden["pairs"][1]["ids"], golden["pairs"][1]
    language = model.generation["languages"][pair["target_language"]]
    if checkpoint.name == "mbart":
        expected = [without_end(ids) for ids in pair["tokens"]]
        assert model.generate(rows, max_new_tokens=12, start_id=language) == expected
        every = [range(model.config.vocab_size)] * len(rows)
        assert model.generate(rows, max_new_tokens=12, start_id=language, candidates=every) == expected
        assert model.generate(rows, max_new_tokens=12) != expected
    with pytest.raises(UserError, match="start_id: 4000 is outside the vocabulary of"):
        model.generate(rows, start_id=4000)


def test_the_folder_that_is_written_says_the_same(checkpoint, tmp_path):
    """What of it `transformers` has no key for stays ours: the file that says where languages stand isn't theirs."""
    written = to_huggingface(checkpoint, tmp_path / "theirs")
    start = json.loads((written / "generation_config.json").read_text())["decoder_start_token_id"]
    assert start == Transformer.load(checkpoint).config.bos_id
