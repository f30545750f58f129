"""JSON that others write: whatever type a value has, the folder is refused in one line, or read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from foreign_json import VALUES, files_of, linked, nodes, replaced, write, write_sentences

from mlx_transformer.families.conversion import Imported, read_published
from mlx_transformer.families.sentence_folder import read_sentence_folder
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.files import JsonObject
from mlx_transformer.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
FOLDERS = (
    "golden/t5",
    "golden/bart",
    "golden_texts/nllb",
    "golden_encoders/bert-classes",
    "golden_encoders_5/modernbert",
    "golden_decoders/gpt2-numbered",
    "golden_vectors/gemma3",
)
MOST = 25
"""Values of a file that are tried; `make fuzz` draws others."""
LONGEST = 700
"""Characters of a message, the folder's name aside."""


def problem_of(folder: Path) -> str:
    """What a person would not be told well of a folder; "" where there is nothing."""
    try:
        assert isinstance(read_published(folder), Imported)
    except UserError as error:
        message = str(error).replace(str(folder), "")
        return message if "\n" in message or len(message) > LONGEST else ""
    except Exception as error:
        return repr(error)
    return ""


@pytest.mark.fast(
    "sentences",
    "golden/bart",
    "golden_decoders/gpt2-numbered",
    "golden_encoders_5/modernbert",
    "golden_encoders/bert-classes",
)
@pytest.mark.parametrize("name", [*FOLDERS, "sentences"])
def test_a_value_of_another_type(name: str, tmp_path: Path) -> None:
    if name == "sentences":
        write_sentences(tmp_path / "made")
    source = tmp_path / "made" if name == "sentences" else HERE / name
    folder, wrong, number = linked(source, tmp_path / "theirs"), {}, 0
    assert problem_of(folder) == ""
    for file, values in files_of(folder).items():
        ways = list(nodes(values))
        for way in ways[:: max(1, len(ways) // MOST)]:
            number += 7
            write(file, replaced(values, way, VALUES[number % len(VALUES)]))
            if problem := problem_of(folder):
                wrong[file.name, way, number % len(VALUES)] = problem
        write(file, values)
    assert wrong == {}


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("1_Pooling/config.json", "pooling_mode", 3, "pooling_mode is 3, not a string or a list of strings"),
        ("1_Pooling/config.json", "pooling_mode", [["cls"]], "pooling_mode is [['cls']], not a list of strings"),
        ("1_Pooling/config.json", "pooling_mode_cls_token", "x", "pooling_mode_cls_token is 'x', not true or false"),
        ("2_Dense/config.json", "out_features", "x", "out_features is 'x', not a whole number"),
        ("2_Dense/config.json", "activation_function", [], "activation_function is [], not a string"),
        ("config_sentence_transformers.json", "default_prompt_name", 3, "default_prompt_name is 3, not a string"),
        ("sentence_bert_config.json", "modality_config", [3], "modality_config is [3], not an object"),
    ],
)
def test_file_and_key_are_named(file: str, key: str, value: object, message: str, tmp_path: Path) -> None:
    write_sentences(tmp_path / "made")
    folder = linked(tmp_path / "made", tmp_path / "theirs")
    write(folder / file, {**files_of(folder)[folder / file], key: value})
    with pytest.raises(UserError) as error:
        read_sentence_folder(folder)
    assert str(error.value) == f"{folder / file}: {message}"


def test_a_value_that_is_missing_or_null_has_its_default():
    values = JsonObject({"null": None, "text": "x", "flag": False, "whole": 0, "inner": {"a": {"b": 5}}}, "x.json")
    assert (values.text("null"), values.text("none", "y"), values.text("text")) == (None, "y", "x")
    assert (values.flag("null", True), values.flag("flag", True), values.whole("whole", 3)) == (True, False, 0)
    assert (values.texts("null"), values.texts("text"), values.object("none")) == ([], ["x"], {})
    with pytest.raises(UserError, match=r"^x\.json: inner: a: b is 5, not a string$"):
        values.object("inner").object("a").text("b")
    with pytest.raises(UserError, match="flag is False, not a whole number"):
        values.whole("flag")


@pytest.mark.parametrize("form", ["single", "pair"])
def test_a_template_lists_its_special_tokens(form: str) -> None:
    """The library would panic at the first text, or at the first pair."""
    file = HERE / "golden_vectors" / "gemma3" / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    template = values["post_processor"]
    wrong = {**template, form: [{"SpecialToken": {"id": "<x>", "type_id": 0}}, *template[form]]}
    for processor in (wrong, {"type": "Sequence", "processors": [wrong]}):
        with pytest.raises(UserError, match="theirs: post_processor: '<x>' isn't "):
            Tokenizer(json.dumps({**values, "post_processor": processor}), "theirs")


def test_a_long_list_of_problems_is_a_count_and_the_first(tmp_path: Path) -> None:
    folder = linked(HERE / "golden" / "t5", tmp_path / "theirs")
    values = files_of(folder)[folder / "config.json"]
    write(folder / "config.json", {**values, "num_layers": 9})
    with pytest.raises(UserError) as error:
        read_published(folder)
    message = str(error.value)
    assert len(message.replace(str(folder), "")) < 400
    assert f"{len(error.value.problems)}, the first of them missing " in message
    assert f"mlx-transformer info {folder} lists all" in message
    assert len(error.value.problems) > 20
