"""Damaged vocabularies of transformers 4 and 5 with tokens that their makers added.

`import` refuses one in a line, says that it left it out, or cuts text as before, or as `tokenizers` does by the damaged
file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import damage
import published_text
import tokenizers
from attempts import Attempt
from foreign import of_another_type
from golden_tokens import ENCODERS, FOLDERS, GOLDEN, STARTS
from kind import Class

from mlx_transformer.families.languages import LANGUAGE

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
BERT: dict[str, Any] = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
DISTILBERT: dict[str, Any] = dict(dim=8, n_layers=1, n_heads=2, hidden_dim=8)
SIZES = {**dict.fromkeys(ENCODERS, BERT), **dict.fromkeys(("t5", "mt5", "umt5"), published_text.T5)}
SIZES["distilbert"] = DISTILBERT
SOME = 12
"""So many lines are cut."""


def makers(random: Random, folder: Path) -> None:
    """FOLDER/theirs: a small model with one of the vocabularies, and one of its files damaged; FOLDER/what: which."""
    name = random.choice(FOLDERS)
    facts, kind = (json.loads((GOLDEN / name / file).read_text("utf-8")) for file in ("texts.json", "config.json"))
    special, model_type = facts["special"], kind["model_type"]
    sizes = SIZES.get(model_type, published_text.STACKS)
    ids = {"pad_token_id": special["pad"], "eos_token_id": special["eos"]}
    if model_type not in ENCODERS:
        ids["decoder_start_token_id"] = special[STARTS[model_type]]
    elif model_type in ("bert", "distilbert"):
        del ids["eos_token_id"]
    values = {"model_type": model_type, **sizes, **ids, "vocab_size": facts["size"] + 110}
    theirs = published_text.write_model(folder / "theirs", values)
    ignored = shutil.ignore_patterns("texts.json", "config.json")
    shutil.copytree(GOLDEN / name, theirs, ignore=ignored, dirs_exist_ok=True)
    path = random.choice(
        [file for file in map(theirs.joinpath, FILES) if file.is_file()] * 4 + [*theirs.glob("*.model")]
    )
    how = damage.in_marian if path.suffix == ".model" else random.choice([damage.in_json_file, of_another_type])
    if path.name == "tokenizer.json" and random.random() < 0.5:  # most of the file is its pieces
        how = _in_a_component
    how(random, path)
    (folder / "what").write_text(f"{name} {path.name}", encoding="utf-8")


def _in_a_component(random: Random, path: Path) -> None:
    """Damage to anything but the vocabulary."""
    values = json.loads(path.read_bytes())
    key = random.choice([key for key in values if key != "model"])
    changed = damage.in_json(random, values[key])
    path.write_bytes(json.dumps({**values, key: changed}).encode(errors="surrogatepass"))


def imported(random: Random, folder: Path) -> Attempt:
    def python() -> None:
        from mlx_transformer.convert import import_huggingface
        from mlx_transformer.text.tokenizer import Tokenizer

        name, file = (folder / "what").read_text(encoding="utf-8").split()
        facts = json.loads((GOLDEN / name / "texts.json").read_text(encoding="utf-8"))
        notes = import_huggingface(folder / "theirs", folder / "new")
        said = f"{name} {file}: {'; '.join(notes)}"
        if any(note.startswith("no tokenizer") for note in notes):
            print(said)
            return
        texts, before = facts["texts"][-SOME:], facts["ids"][-SOME:]
        ours = Tokenizer.load(folder / "new").source.encode_batch(texts)
        if ours == before or file != "tokenizer.json":
            print(f"{'as before' if ours == before else 'other ids'}: {said}")
            return
        try:
            library = tokenizers.Tokenizer.from_file(str(folder / "theirs" / file))
        except BaseException as error:  # what Rust raises
            raise RuntimeError(f"silent: `tokenizers` doesn't read the file ({error})") from None
        entries = json.loads((folder / "theirs" / file).read_bytes()).get("added_tokens") or []
        if any(library.token_to_id(entry["content"]) != entry["id"] for entry in entries):
            print(f"as the file's ids, which the library counts anew: {said}")
            return
        languages = {id for id, content, *_ in facts["flags"] if LANGUAGE.fullmatch(content)}
        theirs = [[id for id in each.ids if id not in languages] for each in library.encode_batch(texts)]
        for text, mine, was, new in zip(texts, ours, before, theirs, strict=True):
            if mine not in (was, new):
                raise RuntimeError(f"silent, {name}: {text!r} is {mine}; it was {was}, and is {new} to `tokenizers`")
        print(f"as the library: {said}")

    return python


VOCABULARIES = (Class("vocabularies of transformers", (), makers, imported, 60),)
