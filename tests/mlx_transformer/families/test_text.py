"""Published vocabularies, as their makers ship them, give the ids that `transformers` looks up; SentencePiece's own
package cuts the text for the judge."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
from combined import combined, thinned
from published_folders import CODES, FAIRSEQ, bart_files, left_behind, of_many_languages, t5_config
from published_text import (
    STACKS,
    judge_of,
    lines,
    looked_up,
    stripped,
    text_pieces,
    trained,
    two_languages,
    write_model,
)

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from mlx_transformer import Transformer, UserError, cli
from mlx_transformer.convert import import_huggingface
from mlx_transformer.text.sentencepiece import parse_sentencepiece
from mlx_transformer.text.sentencepiece_tokenizer import tokenizer_json
from mlx_transformer.text.tokenizer import Tokenizer


def test_t5_has_blanks_behind_its_pieces_the_last_one_first(tmp_path):
    model = trained(two_languages()[0], pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    judge = judge_of(model)
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    write_model(tmp_path / "theirs", t5_config(judge, 100, **ids), spiece__model=model)
    assert left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "ours")) == []
    tokenizer, texts = Tokenizer.load(tmp_path / "ours"), lines()
    assert tokenizer.encode_batch(texts) == [[*row, 1] for row in judge.encode(stripped(texts))]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 0, 1, 2)
    assert tokenizer.vocab_size == len(judge) + 100
    assert [tokenizer.token(len(judge) + i) for i in (0, 99)] == ["<extra_id_99>", "<extra_id_0>"]
    assert set(range(len(judge), len(judge) + 100)) < tokenizer.special_ids
    (text,) = Transformer.load(tmp_path / "ours").translate(["translate English to German: Germany"], max_new_tokens=5)
    assert isinstance(text, str)


TASK = "translate English to German: "


@pytest.mark.fast("mlx")
@pytest.mark.parametrize("kind", thinned(["search", "onnx", "mlx"], 2))
def test_t5_is_told_its_task_before_every_line_and_piece(kind, tmp_path, capsys):
    model = trained(two_languages()[0], pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, n_positions=40)
    tasks = {"translation_en_to_de": {"prefix": TASK}, "summarization": {"prefix": "summarize: ", "num_beams": 4}}
    write_model(tmp_path / "theirs", t5_config(judge_of(model), 100, **ids), spiece__model=model)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    more = {"task_specific_params": tasks, "prefix": TASK}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**config, **ids, **more}))
    note = f"texts begin with a task (--task-prefix): '{TASK}', 'summarize: '"
    assert left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "ours")) == [note]
    if kind == "mlx":
        opened = Transformer.load(tmp_path / "ours")
    elif kind == "onnx":
        opened = OnnxTransformer(export_onnx(tmp_path / "ours", tmp_path / "onnx"), threads=1)
    else:
        opened = SearchModel(export_search(tmp_path / "ours", tmp_path / "a.onnx"), threads=1)
    lines, few = ["Germany", "", "two children"], dict(max_new_tokens=4)
    asked = opened.translate([TASK + line if line else "" for line in lines], task_prefix="", **few)
    assert opened.translate(lines, **few) == asked
    told = opened.translate([f"summarize: {line}" if line else "" for line in lines], task_prefix="", **few)
    assert opened.translate(lines, task_prefix="summarize: ", **few) == told
    _, rows = opened.translator.rows([" ".join(["Germany"] * 40)], "split")
    first = Tokenizer.load(tmp_path / "ours").encode(TASK)[:-1][:3]
    assert len(rows) > 1
    assert all(row[:3] == first and len(row) <= 40 for row in rows)
    if kind != "search":
        assert "".join(opened.stream("Germany", **few)) == asked[0]
    if kind == "mlx":
        cli.main(
            ["translate", str(tmp_path / "ours"), "Germany", "--task-prefix", "summarize: ", "--max-new-tokens", "4"]
        )
        assert capsys.readouterr().out == f"{told[0]}\n"
    with pytest.raises(UserError, match="task_prefix=5 must be text"):
        opened.translate(lines, task_prefix=5)


def test_a_tokenizer_that_cuts_otherwise_is_not_taken(tmp_path):
    model = trained(two_languages()[0], pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    theirs, other = tmp_path / "theirs", json.loads(tokenizer_json(parse_sentencepiece(model)))
    other["normalizer"]["normalizers"].pop()  # spaces stay
    write_model(theirs, t5_config(judge_of(model), 100, **ids), spiece__model=model, tokenizer__json=other)
    for name, expected in (("with", True), ("without", False)):
        assert left_behind(import_huggingface(theirs, tmp_path / name)) == []
        tokenizer = Tokenizer.load(tmp_path / name)
        assert (tokenizer.encode("two  spaces ") == tokenizer.encode("two spaces")) is expected
        (theirs / "spiece.model").unlink(missing_ok=True)


@pytest.mark.parametrize("count", [0, 3])
def test_madlad_pads_with_the_beginning_and_has_languages_among_its_pieces(count, tmp_path):
    model = trained(two_languages()[0], user_defined_symbols=["<2de>", "<2fr>"], byte_fallback=True)
    judge = judge_of(model)
    ids = dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=0)
    settings = {"extra_ids": count, "pad_token": {"content": "<s>"}}
    files = dict(spiece__model=model, tokenizer_config__json=settings)
    write_model(tmp_path / "theirs", t5_config(judge, count, **ids), **files)
    assert left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "ours")) == []
    tokenizer, texts = Tokenizer.load(tmp_path / "ours"), [*lines(), "<2de> Germany", "<2fr>x"]
    assert tokenizer.encode_batch(texts) == [[*row, 2] for row in judge.encode(stripped(texts))]
    assert judge.piece_to_id("<2de>") in tokenizer.encode("<2de> Germany")
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.vocab_size) == (1, 0, len(judge) + count)


@pytest.mark.parametrize("offset", [103, 7])
def test_pegasus_has_masks_in_front_of_its_pieces(offset, tmp_path):
    model = trained(two_languages()[0], pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    judge = judge_of(model)
    ids = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    config = {"model_type": "pegasus", **STACKS, **ids, "vocab_size": len(judge) + offset + 1}
    settings = {} if offset == 103 else {"tokenizer_config__json": {"offset": offset}}
    write_model(tmp_path / "theirs", config, spiece__model=model, **settings)
    assert left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "ours")) == []
    tokenizer = Tokenizer.load(tmp_path / "ours")
    texts = [
        text for text in lines()[::3] if not re.search(r"\s\x85|\x85\s", text)
    ]  # which transformers 4 and 5 cut apart
    assert tokenizer.encode_batch(["<mask_1> a", "<unk_5>"]) == [[2, *tokenizer.encode("a")], [7, 1]]
    spaced = [text.replace("\x85", " ") for text in texts]  # transformers cuts words at white space, whichever it is
    assert tokenizer.encode_batch(texts) == [[*(id + offset for id in row), 1] for row in judge.encode(spaced)]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 0, 1, offset + 2)
    assert tokenizer.decode([2, 3, offset - 1, *tokenizer.encode("Germany")]) == judge.decode(judge.encode("Germany"))
    (text,) = Transformer.load(tmp_path / "ours").translate(["Germany"], max_new_tokens=5)
    assert isinstance(text, str)


def test_a_vocabulary_larger_than_the_model_stays_behind(tmp_path):
    model = trained(two_languages()[0], pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    config = {**t5_config(judge_of(model), 0), "vocab_size": 300}
    write_model(tmp_path / "theirs", config, spiece__model=model)
    (note,) = import_huggingface(tmp_path / "theirs", tmp_path / "ours")
    assert "pieces, and the model 300" in note


@cache
def model() -> bytes:
    return trained(two_languages()[0])


@pytest.mark.fast("nllb-numbered-unigram", "mbart-listed-bpe")
@pytest.mark.parametrize(
    ("name", "how", "kind"), combined(["nllb", "mbart"], ["numbered", "added", "listed"], ["unigram", "bpe"])
)
def test_fairseqs_ids_and_languages_behind_them(name, how, kind, tmp_path):
    model = trained(two_languages()[0], model_type=kind)
    first = of_many_languages(tmp_path, model, {"nllb": "m2m_100"}.get(name, name), CODES[name], how)
    tokenizer, texts, judge = Tokenizer.load(tmp_path / "ours"), lines(), judge_of(model)
    rows = judge.encode(stripped(texts))
    assert tokenizer.encode_batch(texts) == [[*(id + 1 if id else 3 for id in row), 2] for row in rows]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 2, 3)
    rows = judge.encode(texts[:300])
    assert tokenizer.decode_batch([[id + 1 for id in row if id] for row in rows]) == [
        judge.decode([id for id in row if id]) for row in rows
    ]
    translator = Transformer.load(tmp_path / "ours")
    assert translator.generation["languages"] == {code: first + i for i, code in enumerate(CODES[name])}
    codes = dict(source_language=CODES[name][0], target_language=CODES[name][1])
    (found,) = translator.generate([tokenizer.encode("Germany")], max_new_tokens=4, **codes)
    assert found[0] == first + 1
    (text,) = translator.translate(["Germany"], max_new_tokens=4, **codes)
    assert text == tokenizer.decode(found)


@pytest.mark.fast("usual")
@pytest.mark.parametrize("how", ["numbered", "listed", "usual"])
def test_m2m100_counts_by_its_vocabulary(how, tmp_path):
    pieces = [piece for i, piece in enumerate(text_pieces(model())) if i % 23 != 5]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "\u4e2d"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    first = of_many_languages(tmp_path, model(), "m2m_100", CODES["m2m_100"], how, vocab__json=vocabulary)
    texts, judge = [*lines(), "\u4e2d"], judge_of(model())
    expected = [looked_up(judge.encode(line, out_type=str), vocabulary) for line in texts]
    assert Tokenizer.load(tmp_path / "ours").encode_batch(texts) == expected
    assert {vocabulary["\u4e2d"], 3} < {id for row in expected for id in row}
    languages = Transformer.load(tmp_path / "ours").generation["languages"]
    assert len(languages) == (100 if how == "usual" else 3)
    assert languages["zh"] == first + (98 if how == "usual" else 2)


def test_languages_without_a_place_stay_behind(tmp_path):
    config = {"model_type": "m2m_100", **STACKS, **FAIRSEQ, "vocab_size": 800}
    for i, (files, reason) in enumerate(
        [
            ({}, "names no tokens of languages"),
            ({"added_tokens__json": {"deu_Latn": 5}}, "deu_Latn has no id behind its"),
            ({"added_tokens__json": {"deu_Latn": 10**9}}, "deu_Latn has no id behind its"),
        ]
    ):
        write_model(tmp_path / f"{i}", config, sentencepiece__bpe__model=model(), **files)
        notes = import_huggingface(tmp_path / f"{i}", tmp_path / "ours", force=i > 0)
        assert reason in notes[-1]
        assert not (tmp_path / "ours" / "tokenizer.json").exists()


def test_mbart_has_25_languages_behind_its_pieces(tmp_path):
    config = {"model_type": "mbart", **STACKS, **FAIRSEQ, "vocab_size": 800}
    write_model(tmp_path / "theirs", config, sentencepiece__bpe__model=model())
    assert left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "ours")) == []
    translator, first = Transformer.load(tmp_path / "ours"), len(judge_of(model())) + 1
    languages = translator.generation["languages"]
    assert (len(languages), languages["ar_AR"], languages["zh_CN"]) == (25, first, first + 24)


@pytest.mark.fast("False")
@pytest.mark.parametrize("space", [False, True])
def test_bart_merges_bytes(space, tmp_path):
    backend, files = bart_files(space)
    config = {"model_type": "bart", **STACKS, **FAIRSEQ, "vocab_size": len(files["vocab__json"]) + 3}
    settings = {"add_prefix_space": space}
    write_model(tmp_path / "theirs", config, **files, tokenizer_config__json=settings)
    assert left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "ours")) == []
    tokenizer, texts = Tokenizer.load(tmp_path / "ours"), lines()
    rows = [encoding.ids for encoding in backend.encode_batch(texts)]
    assert tokenizer.encode_batch(texts) == [[0, *row, 2] for row in rows]
    assert [tokenizer.decode(row).removeprefix(" " * space) for row in tokenizer.encode_batch(texts)] == [
        text.removeprefix(" " * space) for text in texts
    ]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 2, 3)
    assert tokenizer.mask_id == len(files["vocab__json"]) - 1
    (text,) = Transformer.load(tmp_path / "ours").translate(["Germany"], max_new_tokens=5)
    assert isinstance(text, str)


BART_DAMAGE = {
    "is no pair of tokens": lambda v, m: (v, m + "a b c\n"),
    "the vocabulary has no </s>": lambda v, m: ({t: i for t, i in v.items() if t != "</s>"}, m),
    "has two tokens with the same id": lambda v, m: ({**v, "more": 9}, m),
    "not a tokenizer that": lambda v, m: (v, m + "unheard of\n"),
    "ids are not 0 to": lambda v, m: ({**v, "more": len(v) + 2}, m),
}


@pytest.mark.parametrize("reason", BART_DAMAGE)
def test_damaged_merges_stay_behind_with_a_note(reason, tmp_path):
    _, files = bart_files(False)
    vocabulary, merges = BART_DAMAGE[reason](files["vocab__json"], files["merges__txt"])
    config = {"model_type": "bart", **STACKS, **FAIRSEQ, "vocab_size": len(files["vocab__json"]) + 3}
    write_model(tmp_path / "theirs", config, vocab__json=vocabulary, merges__txt=merges)
    (note,) = import_huggingface(tmp_path / "theirs", tmp_path / "ours")
    assert reason in note


SYMBOLS = ["<start_of_turn>", "\n", "\u2581\u2581", "\u2581\u2581\u2581", "<b>"]
"""Pieces that a text has whole, as Gemma's."""
LLAMA = dict(model_type="llama", hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=1)
BPE = dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_decoder_has_tokenizer_model_alone(prefix, tmp_path):
    """SentencePiece's BPE, as folders of Llama 2, Mistral and Gemma have it."""
    model = trained(
        lines(), 900, **BPE, **({} if prefix else dict(add_dummy_prefix=False, user_defined_symbols=SYMBOLS))
    )
    judge = judge_of(model)
    values = {**LLAMA, "vocab_size": len(judge) + 1, "bos_token_id": 1, "eos_token_id": 2}
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    added = {str(len(judge)): {"content": "<|im_end|>", "special": True}}
    files = dict(tokenizer__model=model, tokenizer_config__json={**settings, "added_tokens_decoder": added})
    write_model(tmp_path / "theirs", values, **files)
    notes = left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "ours"))
    assert [note.partition(":")[0] for note in notes] == (
        [] if prefix else ["tokens that were added to its vocabulary, each one id in a text"]
    )
    tokenizer = Tokenizer.load(tmp_path / "ours")
    texts = [*lines(), "a   b", "  a", "a\n\nb ", "<b>x</b>"]
    assert tokenizer.prompts(texts) == [[1, *row] for row in judge.encode(texts)]
    assert tokenizer.prompts(["a<|im_end|>"], True)[0][-1] == len(judge)
    assert [*map(tokenizer.decode, judge.encode(texts[:200]))] == judge.decode(judge.encode(texts[:200]))


def test_other_kinds_of_tokenizer_model_are_named(tmp_path):
    values = {**LLAMA, "vocab_size": 700, "bos_token_id": 1, "eos_token_id": 2}
    write_model(tmp_path / "theirs", values, tokenizer__model=trained(lines()))
    (note,) = left_behind(import_huggingface(tmp_path / "theirs", tmp_path / "ours"))
    assert "it is a unigram model; it replaces characters by a table; it takes several spaces as one: put the" in note
