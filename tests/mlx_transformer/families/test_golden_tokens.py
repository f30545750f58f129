"""Tokens that a maker added, in folders of transformers 4 and 5: ids, texts and flags are theirs.

`make_golden_tokens.py` beside this makes the folders.
"""

from __future__ import annotations

import json

import pytest
import tokenizers
from golden_tokens import FOLDERS, GOLDEN, golden

from mlx_transformer.families.added import summary, with_specials
from mlx_transformer.families.folder import read_languages, read_tokenizer, tokenizer_config
from mlx_transformer.families.text import displaced_languages, makers_files
from mlx_transformer.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=FOLDERS)
def made(request):
    return golden(request.param)


def test_ids_and_texts_are_theirs(made):
    facts, text, _ = made
    ours = Tokenizer(text)
    assert ours.source.encode_batch(facts["texts"]) == facts["ids"]
    assert ours.decode_batch(facts["ids"]) == facts["decoded"]


def test_typed_roles_are_text(made):
    _, text, config = made
    ours = Tokenizer(text)
    spelled = {ours.token(id) for id in (config.pad_id, config.bos_id, config.eos_id)}
    for token in spelled:
        inside = ours.source.encode(f"a {token} b")[1:-1]
        assert not {config.pad_id, config.bos_id, config.eos_id} & set(inside), token


def test_flags_come_back(made):
    facts, text, config = made
    published = with_specials(json.loads(text), published=True)
    names = ("id", "content", "special", "normalized", "lstrip", "rstrip", "single_word")
    flags = {entry["id"]: [entry[name] for name in names] for entry in published["added_tokens"]}
    makers = [each for each in facts["flags"] if each[1] in ("[E1]", "<hole>", "{NAME}")]
    assert len(makers) == 3
    assert [flags[each[0]] for each in makers] == makers
    settings = tokenizer_config(config, json.dumps(published))
    assert "[E1]" in settings["additional_special_tokens"]
    assert settings["split_special_tokens"] is False
    ids = {entry["content"]: entry["id"] for entry in published["added_tokens"]}
    roles = {role: ids.get(settings.get(f"{role}_token")) for role in facts["special"]}
    if "m2m100" in facts["name"]:
        roles["cls"] = None  # its class has none, and `makers_files` leaves it out
    assert roles == facts["special"]


@pytest.mark.parametrize("name", [name for name in FOLDERS if "marian" in name or "m2m100" in name])
def test_what_is_written_for_a_class_in_python_are_its_own_files(name, tmp_path):
    """Their class decodes otherwise than a tokenizer.json can."""
    facts, text, config = golden(name)
    plain = tokenizer_config(config, text, settings={"source_language": "en", "target_language": "de"})
    files = makers_files(text, facts["model_type"], plain, {})
    (tmp_path / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    assert read_tokenizer(tmp_path, config, facts["model_type"]) == (text, [])
    for file in ("vocab.json", "tokenizer_config.json"):
        theirs, written = (json.loads((folder / file).read_text("utf-8")) for folder in (GOLDEN / name, tmp_path))
        kept = (
            written if file == "vocab.json" else ("tokenizer_class", "added_tokens_decoder", "eos_token", "pad_token")
        )
        assert {key: written[key] for key in kept} == {key: theirs[key] for key in kept}


@pytest.mark.fast("v5/nllb", "v5/t5", "v4/pegasus", "v5/distilbert", "v5/mbart")
def test_a_package_is_cut_alike_by_the_library(made):
    """But for the families whose ids are none of their model's pieces."""
    facts, text, config = made
    specification = json.loads(text)
    if "lookup" in specification["post_processor"]["mlx_transformer"]:
        return
    settings = tokenizer_config(config, text)
    backend = tokenizers.Tokenizer.from_str(text)
    backend.encode_special_tokens = settings["split_special_tokens"]
    assert settings["split_special_tokens"] is True
    assert [each.ids for each in backend.encode_batch(facts["texts"])] == facts["ids"]
    if config.architecture != "encoder":  # which writes no text
        assert backend.decode_batch(facts["ids"]) == facts["decoded"]
    again = with_specials(with_specials(specification, published=True), published=False)
    assert again == specification


@pytest.mark.parametrize("name", [f"v{n}/{kind}" for n in (4, 5) for kind in ("nllb", "pegasus", "mbart", "t5")])
def test_white_space_is_cut_as_the_files_components_cut_it(name):
    _, text, _ = golden(name)
    library = tokenizers.Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))
    lines = ["a ", "a  ", "a\t", " a b ", "[E1] ", "a {NAME} "] if name.startswith("v5") else []
    lines += [
        "  \n1",
        "x\r\n  1",
        "a  \n,",
        "a\n  b",
        " \n\n 1",
        "a\x85",
        "\x85a",
        "a\x85b",
        "a\u2028",
        "a \x85\u2028",
        "a\x85 {NAME} a\x85",
        "a \x85 b",
    ]
    cut = [each.ids for each in library.encode_batch(lines, add_special_tokens=False)]
    assert [ids[: len(own)] for ids, own in zip(Tokenizer(text).encode_batch(lines), cut, strict=True)] == cut


def test_languages_that_added_tokens_displace_are_told():
    _, text, config = golden("v5/m2m100")
    languages = read_languages(GOLDEN / "v5" / "m2m100", config, text)
    [note] = displaced_languages(GOLDEN / "v5" / "m2m100", config, languages)
    assert note.endswith(": af, am, ar")  # the first three of its list


def test_the_summary_names_them(made):
    _, text, config = made
    notes = summary(text, config, {"truncation_side": "left"})
    assert any("'[E1]'" in note and "'<hole>'" in note and "'{NAME}'" in note for note in notes)
    assert any("rows of the table have no token" in note for note in notes)
    assert "truncation_side" in notes[-1]
