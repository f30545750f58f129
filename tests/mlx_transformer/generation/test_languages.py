"""Models of several languages: their tokens read from a published tokenizer, asked for by code, in ids and in text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import ending_model

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from mlx_transformer import UserError, cli, load
from mlx_transformer.convert import import_huggingface
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.generation.settings import language_id, settings_text
from mlx_transformer.text.tokenizer import Tokenizer

MARIAN = Path(__file__).parents[1] / "families" / "golden" / "marian"
SMALL_100 = MARIAN.parent / "small100"
NLLB = {"eng_Latn": 5, "deu_Latn": 6, "<mask>": 7, "zho_Hans": 8}
KINDS = {
    "tokenizer.json": (
        {"added_tokens": [{"id": id, "content": text} for text, id in NLLB.items()], "model": {}},
        {"eng_Latn": 5, "deu_Latn": 6, "zho_Hans": 8},
    ),
    "added_tokens.json": ({"__en__": 9, "__ast__": 10, "en_XX": 11, "other": 12, "__xx__": 4000}, None),
}


@pytest.mark.parametrize("name", KINDS)
def test_languages_are_read_from_the_tokenizer(name, tmp_path):
    contents, expected = KINDS[name]
    shutil.copytree(SMALL_100, tmp_path / "theirs")
    (tmp_path / "theirs" / name).write_text(json.dumps(contents))
    import_huggingface(tmp_path / "theirs", tmp_path / "ours")
    model, _ = load(tmp_path / "ours")
    assert model.generation["languages"] == (expected or {"en": 9, "ast": 10, "en_XX": 11})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of two languages with a tokenizer of ours."""
    folder = tmp_path_factory.mktemp("languages")
    tokenizer = Tokenizer.train(["one two three four five six seven " * 3], vocab_size=280)
    sizes = dict(encoder_layers=1, decoder_layers=1, d_model=32, heads=2, d_ff=32, max_positions=16)
    model = ending_model(tokenizer, **sizes)
    texts = settings_text({"languages": {"eng_Latn": 270, "deu_Latn": 271}, "beam": 2})
    save_checkpoint(folder / "model", model.config, model.weights(), tokenizer.to_json(), texts=texts)
    return folder / "model"


def opened(checkpoint: Path, kind: str):
    if kind == "mlx":
        return load(checkpoint)[0]
    if kind == "onnx":
        return OnnxTransformer(export_onnx(checkpoint, checkpoint.parent / "onnx", force=True), threads=1)
    return SearchModel(export_search(checkpoint, checkpoint.parent / "search.onnx", force=True), threads=1)


@pytest.mark.parametrize("kind", ["mlx", "onnx", "search"])
def test_languages_are_tokens_in_front(kind, checkpoint):
    model, rows = opened(checkpoint, kind), [[20, 30, 2], [25, 2]]
    spoken = model.generate(rows, source_language="eng_Latn", target_language="deu_Latn", max_new_tokens=6)
    assert spoken == model.generate([[270, *row] for row in rows], forced_first=[271], max_new_tokens=6)
    assert all(row[0] == 271 for row in spoken)
    ids = model.tokenizer.encode_batch(["one two", "three"])
    expected = [model.tokenizer.decode(row) for row in model.generate([[270, *x] for x in ids], forced_first=[271])]
    languages = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    assert model.translate(["one two", "three"], **languages) == expected
    if kind != "search":
        streamed = "".join(model.stream("one two", **languages))
        assert streamed == model.translate("one two", beam=1, **languages)
    with pytest.raises(UserError, match="unknown language 'eng'; did you mean eng_Latn"):
        model.generate(rows, target_language="eng")
    with pytest.raises(UserError, match="unknown language 'xx'; the model has 2"):
        model.generate(rows, source_language="xx")
    with pytest.raises(UserError, match="did you mean eng_Latn"):
        model.generate(rows, source_language="ENG_LATN")
    with pytest.raises(UserError, match="language 'eng_Latn': the model has no language tokens; leave it out"):
        language_id({}, "eng_Latn")


@pytest.mark.parametrize("kind", ["mlx", "onnx", "search"])
def test_ids_without_a_language_are_asked_for_one(kind, checkpoint):
    model = opened(checkpoint, kind)
    with pytest.raises(UserError, match="source_language and target_language: the model has 2 languages"):
        model.generate([[20, 2]], max_new_tokens=3)
    with pytest.raises(UserError, match=r"^target_language: the model has 2 languages"):
        model.generate([[270, 20, 2]], max_new_tokens=3)
    spoken = model.generate([[270, 20, 2]], target_language="deu_Latn", max_new_tokens=3)
    assert spoken == model.generate([[20, 2]], source_language="eng_Latn", forced_first=[271], max_new_tokens=3)
    mixed = model.generate([[270, 20, 2]] * 2, prefix=[[271]] * 2, max_new_tokens=2)
    assert mixed == [spoken[0][:2]] * 2


@pytest.mark.parametrize("kind", ["mlx", "onnx"])
def test_scores_are_those_of_the_search(kind, checkpoint, capsysbinary, tmp_path):
    """Of a translation, given its language; the language's own token has none."""
    model = opened(checkpoint, kind)
    languages = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    [[best]] = model.search([[20, 30, 2]], **languages, max_new_tokens=6, beam=1, length_penalty=0.0)
    ids = [270, 20, 30, 2]
    [values] = model.log_probabilities([ids[1:]], [best.ids[1:]], **languages)
    assert values.sum() == pytest.approx(best.score, abs=1e-5)
    [bare] = model.log_probabilities([ids], [best.ids], source_language=None, target_language="deu_Latn")
    assert len(bare) == len(best.ids)  # the target's token is scored where it stands in the target too
    with pytest.raises(UserError, match="source_language and target_language"):
        model.score("one", "two")
    for name in ("source", "target"):
        (tmp_path / name).write_text("one\n")
    files = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "target")]
    path = str(checkpoint if kind == "mlx" else checkpoint.parent / "onnx")
    cli.main(["score", path, *files, "--source-language", "eng_Latn", "--target-language", "deu_Latn"])
    total = float(capsysbinary.readouterr().out.split(b"\t")[0])
    assert total == pytest.approx(model.score("one", "one", **languages), abs=1e-4)


def test_a_line_leaves_room_for_its_language(checkpoint):
    """Of 16 positions text may take 15."""
    model = load(checkpoint)[0]
    line = "one two three four five six seven " * 4
    languages = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    assert model.translate(line, overlong="split", **languages)
    longest = max(len(row) for row in model.translator.rows([line], "split")[1])
    assert longest <= 15


def test_the_command_takes_codes(checkpoint, capsysbinary):
    cli.main(
        ["translate", str(checkpoint), "one two", "--source-language", "eng_Latn", "--target-language", "deu_Latn"]
    )
    found = capsysbinary.readouterr().out.decode()
    languages = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    assert found == f"{load(checkpoint)[0].translate('one two', **languages)}\n"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["translate", str(checkpoint), "one two", "--target-language", "deu"])
    assert b"unknown language 'deu'; did you mean deu_Latn" in capsysbinary.readouterr().err


@pytest.mark.parametrize("languages", [[1], {"eng_Latn": 280}, {"eng_Latn": "5"}, {"eng_Latn": True}], ids=str)
def test_languages_that_are_none(languages, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    (tmp_path / "model" / "generation.json").write_text(json.dumps({"languages": languages}))
    with pytest.raises(UserError, match=r"languages must be \{code: id\} with ids below 280"):
        load(tmp_path / "model")[0].generate([[20, 2]])


@pytest.mark.parametrize("kind", ["mlx", "onnx", "search"])
def test_small_100_is_told_the_target_before_the_source(kind, tmp_path):
    """The first token of each of transformers' sources is taken for a language's: with the others and its code it
    gives the same tokens."""
    answers = np.load(SMALL_100 / "answers.npz")
    rows = [ids[real].tolist() for ids, real in zip(answers["ids"], answers["mask"].astype(bool), strict=True)]
    codes = dict(zip(("de", "fr", "zh"), (row[0] for row in rows), strict=True))
    theirs = shutil.copytree(SMALL_100, tmp_path / "theirs")
    (theirs / "added_tokens.json").write_text(json.dumps({f"__{code}__": id for code, id in codes.items()}))
    (theirs / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "SMALL100Tokenizer"}))
    import_huggingface(theirs, tmp_path / "model")
    model, eos = opened(tmp_path / "model", kind), 2
    for row, code, expected in zip(rows, codes, answers["tokens"].tolist(), strict=True):
        if len(row) > 1:
            found = model.generate([row[1:]], target_language=code, max_new_tokens=len(expected))
            assert found == [expected[: expected.index(eos)] if eos in expected else expected]
            assert model.generate([row], max_new_tokens=len(expected)) == found
    with pytest.raises(UserError, match="source_language: the model needs only the target's language"):
        model.generate([[5]], source_language="de", target_language="fr")


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_place_of_the_target_that_is_none(value, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    (tmp_path / "model" / "generation.json").write_text(json.dumps({"target_language_in_source": value}))
    with pytest.raises(UserError, match="target_language_in_source is neither true nor false"):
        load(tmp_path / "model")[0].generate([[20, 2]])
