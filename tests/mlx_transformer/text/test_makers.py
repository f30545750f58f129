"""Published decoders' tokenizer.json as they are: ids and text of `transformers`, the file byte for byte."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from makers_tokenizers import SPECIAL, START, hard_texts, makers_json

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.families.added import summary
from mlx_transformer.families.folder import read_tokenizer
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden_makers.json").read_text())
SIZES = {"vocab_size": 400, "d_model": 16, "heads": 2, "d_ff": 16}
DECODER = TransformerConfig(
    architecture="decoder", encoder_layers=0, tie_embeddings="none", pad_id=390, bos_id=7, eos_id=9, **SIZES
)


@pytest.mark.parametrize("kind", SPECIAL)
def test_ids_and_text_are_those_of_transformers(kind):
    tokenizer = Tokenizer(makers_json(kind))
    for text, (split, parsed, decoded, without_control) in zip(hard_texts(kind), GOLDEN[kind], strict=True):
        assert tokenizer.encode(text) == split, text
        assert tokenizer.prompts([text], control=True)[0] == (parsed or [-1]), text
        assert tokenizer.decode(split) == decoded
        assert tokenizer.decode(parsed) == without_control


@pytest.mark.parametrize("kind", SPECIAL)
def test_prompts_and_documents(kind):
    """A prompt begins as the maker has it; what is learned ends with the config's end token."""
    tokenizer = Tokenizer(makers_json(kind))
    tokenizer.check_fits(DECODER, "here")
    start = [Tokenizer(makers_json(kind))._backend.token_to_id(START[kind])] if kind in START else []
    prompt, empty = tokenizer.prompts(["the cat", ""])
    assert prompt == tokenizer.encode("the cat")
    assert prompt[: len(start)] == start
    assert empty == (start or [7])
    assert tokenizer.documents(["the cat", ""]) == [[*prompt[len(start) :], 9], [9]]


def test_what_a_post_processor_puts_behind_a_text_is_no_prompt():
    """Qwen3-Embedding's ends with <|endoftext|>."""
    values = json.loads(makers_json("qwen2"))
    end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    token = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [376], "tokens": ["<|endoftext|>"]}}
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, end], "pair": []}
    values["post_processor"] = {**template, "special_tokens": token}
    tokenizer, plain = Tokenizer(json.dumps(values)), Tokenizer(makers_json("qwen2"))
    tokenizer.check_fits(DECODER, "here")
    assert tokenizer.encode("cat") == [*plain.encode("cat"), 376]
    assert tokenizer.prompts(["cat", ""]) == [plain.encode("cat"), [7]]
    assert tokenizer.documents(["cat"]) == [[*plain.encode("cat"), 9]]


@pytest.mark.parametrize(("kind", "starts"), [("qwen2", False), ("llama3", True)])
def test_a_start_token_that_the_file_doesn_t_put_is_told(kind, starts):
    """transformers' classes for some families add one by tokenizer_config.json, or leave it out."""
    for asked in (None, starts, not starts):
        notes = summary(makers_json(kind), DECODER, {"add_bos_token": asked, "add_eos_token": False})
        told = "not done, though tokenizer_config.json asks for it: add_bos_token" in notes
        assert told == (asked is not None and asked != starts)


def test_a_folder_s_file_stays_as_it_is(tmp_path):
    text = makers_json("llama3").replace('"version": "1.0"', '"version"  :  "1.0"')
    (tmp_path / "tokenizer.json").write_bytes(text.encode())
    found, notes = read_tokenizer(tmp_path, DECODER, "llama")
    assert (found, notes) == (text, [])
    Tokenizer(text).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == text.encode()


def test_an_expression_that_takes_too_long_is_given_up():
    values = json.loads(makers_json("qwen2"))
    values["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"
    for encode in (Tokenizer(json.dumps(values)).encode, Tokenizer(json.dumps(values)).encode_control):
        with pytest.raises(UserError, match="own regular expression takes too long on this text"):
            encode("a" * 60 + "b")


def test_other_models_are_refused():
    tokenizer = Tokenizer(makers_json("gpt2"))
    small = dataclasses.replace(DECODER, vocab_size=376, source_vocab_size=376, pad_id=0)
    with pytest.raises(UserError, match="here: tokenizer of 377 tokens, but the model has 376"):
        tokenizer.check_fits(small, "here")
    with pytest.raises(UserError, match=r"here/tokenizer.json: is a published decoder's"):
        tokenizer.check_fits(TransformerConfig(**SIZES), "here")
