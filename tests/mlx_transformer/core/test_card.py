"""Model cards: what they say, what of another's card they hand on, and that what a person wrote stays."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from small_checkpoint import CONFIG, TOKENIZER, contents, saved, weights

from mlx_transformer.core.card import (
    BEGIN,
    END,
    UNPROVEN,
    begin_card,
    carried,
    front_matter,
    keys_of,
    note_proof,
    yaml_of,
)
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.folders import fingerprint
from mlx_transformer.core.heads import Head

SCORES = [{"name": "x", "results": [{"task": {"type": "translation"}, "metrics": [{"type": "bleu", "value": 31.5}]}]}]
KNOWN = {"language": ["en", "no", "zh-CN"], "license": "mit", "model-index": SCORES}


def matter(text):
    first, found, body = text.split("---\n", 2)
    assert first == ""
    return yaml.safe_load(found), body


def test_a_card_says_what_the_model_is_and_asks_for_a_license(tmp_path):
    text = (saved(tmp_path / "one") / "README.md").read_text(encoding="utf-8")
    keys, body = matter(text)
    assert keys == {
        "pipeline_tag": "translation",
        "library_name": "mlx-transformer",
        "tags": ["mlx", "transformer"],
    }
    assert text.splitlines()[1].startswith("# license: fill in ")
    size = (tmp_path / "one" / "model.safetensors").stat().st_size
    assert size < 100_000
    assert f"| `model.safetensors` | {size / 1e3:,.1f} kB |" in body
    assert f"{BEGIN}\n{UNPROVEN}\n{END}" in body
    assert "\nmodel.translate(" not in body
    assert 'print(model.translate("A sentence.", beam=4))' in body


def test_what_is_known_wins_and_is_handed_on(tmp_path):
    save_checkpoint(tmp_path / "a", CONFIG, weights(), texts={"README.md": begin_card(**KNOWN, datasets=None)})
    text = (tmp_path / "a" / "README.md").read_text(encoding="utf-8")
    keys, body = matter(text)
    assert {name: keys[name] for name in KNOWN} == KNOWN
    assert "datasets" not in keys
    assert "# license" not in text
    assert "print(model.generate([[5, 6, 7]], beam=4))" in body  # it has no tokenizer
    assert matter(carried(tmp_path / "a"))[0] == {
        "license": "mit",
        "language": ["en", "no", "zh-CN"],
        "pipeline_tag": "translation",
    }
    assert matter(carried(tmp_path / "a", results=True))[0]["model-index"] == SCORES
    assert keys_of(carried(tmp_path)) == {}


def test_front_matter_of_others_stays_as_it_is():
    language, license, other = "language: # two\n  - en\n  - de", "license: apache-2.0", "x: |\n  a: b"
    keys = keys_of(f"---\n# a remark\n{language}\n{license}\n{other}\n---\n# Title\nlicense: no\n")
    assert keys == {"language": language, "license": license, "x": other}
    assert keys_of(front_matter(keys, "told")) == keys
    for damaged in ("", "# none", "---\nlicense: mit\n", "\n---\na: b\n---\n"):
        assert keys_of(damaged) == {}
    value = {"a": [{"b": "no", "c": 'quote " and: é', "d": 1.5}, ["x", "y"]], "e": "plain", "f": [], "g": {}}
    assert yaml.safe_load(yaml_of("key", value)) == {"key": value}


def test_people_fill_in_a_card_and_the_model_is_still_whole(tmp_path):
    folder = saved(tmp_path / "one")
    before = fingerprint(folder)
    assert "README.md" not in json.loads((folder / "manifest.json").read_text())["files"]
    card = folder / "README.md"
    mine = card.read_text(encoding="utf-8").replace("---\n#", "---\nlicense: mit\n#", 1)
    card.write_text(mine, encoding="utf-8")
    open_checkpoint(folder)
    assert fingerprint(folder) == before
    saved(folder, value=2.0)
    assert card.read_text(encoding="utf-8") == mine
    card.unlink()
    open_checkpoint(folder)


def test_a_card_of_ones_own_is_never_written_over(tmp_path):
    folder = saved(tmp_path / "one")
    for own in (b"# Mine\n", b"\xff\xfe no text", b""):
        (folder / "README.md").write_bytes(own)
        saved(folder, value=2.0)
        note_proof(folder, "equal")
        assert (folder / "README.md").read_bytes() == own


def test_a_proof_is_put_between_its_marks(tmp_path):
    folder = saved(tmp_path / "one")
    fresh = contents(folder)
    note_proof(folder, "**Equal**, é")
    card = folder / "README.md"
    assert f"{BEGIN}\n**Equal**, é\n{END}" in card.read_text(encoding="utf-8")
    saved(folder)  # other weights, so that nothing is proven of them; and the card was nobody's but ours
    assert contents(folder) == fresh

    mine = card.read_text(encoding="utf-8").replace("# A Transformer", "# My Transformer")
    card.write_text(mine, encoding="utf-8")
    note_proof(folder, "**Equal**")
    assert card.read_text(encoding="utf-8") == mine.replace(UNPROVEN, "**Equal**")
    saved(folder)
    assert card.read_text(encoding="utf-8") == mine
    card.unlink()
    note_proof(folder, "**Equal**")
    assert not card.exists()


@pytest.mark.parametrize(
    ("head", "pipeline", "call"),
    [
        ({}, "fill-mask", 'model.fill("A <mask> sentence.")'),
        ({"kind": "hidden"}, "feature-extraction", "model.token_logits([[5, 6, 7]])"),
        ({"kind": "classes", "labels": ("a", "b")}, "text-classification", "model.token_logits([[5, 6, 7]])"),
        ({"kind": "classes", "labels": ("a", "b")}, "text-classification", 'model.classify("A sentence.")'),
        ({"kind": "token-classes", "labels": ("a", "b")}, "token-classification", "model.token_logits([[5, 6, 7]])"),
        ({"kind": "token-classes", "labels": ("a", "b")}, "token-classification", 'model.tag("A sentence.")'),
        ({"kind": "spans"}, "question-answering", 'model.answer("A question?", "A text.")'),
    ],
)
def test_an_encoder_is_for_what_its_head_gives(head, pipeline, call, tmp_path):
    config = replace(
        CONFIG, vocab_size=9, source_vocab_size=9, architecture="encoder", decoder_layers=0, head=Head(**head)
    )
    folder = save_checkpoint(
        tmp_path / "one", config, weights(config=config), None if "token_logits" in call else TOKENIZER
    )
    keys, body = matter((folder / "README.md").read_text(encoding="utf-8"))
    assert keys["pipeline_tag"] == pipeline
    assert f"print({call})" in body
    code = body.partition("```python\n")[2].partition("```")[0].replace("ORG/NAME or FOLDER", str(folder))
    if "token_logits" in call:
        exec(code, {})
