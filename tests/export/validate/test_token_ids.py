"""The ids that a package's own files give are the checkpoint's, or the first line that differs is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_tokens import golden

from export.validate.checks.package_files import token_problems
from mlx_transformer.families.folder import tokenizer_config
from mlx_transformer.text.tokenizer import Tokenizer


class Opened:
    """What the check asks of a checkpoint."""

    def __init__(self, folder: Path, text: str, config):
        self.folder, self.config, self.text = folder, config, text

    def tokenizer_json(self) -> str:
        return self.text


def package(folder: Path, name: str) -> tuple[Opened, Path, dict, dict]:
    _, text, config = golden(name)
    tokenizer, settings = Tokenizer(text).to_json(), tokenizer_config(config, text)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Opened(folder, text, config), folder, json.loads(tokenizer), settings


def written(folder: Path, values: dict) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("name", ["v5/bert", "v5/bart", "v5/t5", "v4/nllb", "v5/marian", "v4/xlm-roberta", "v5/mbart"])
def test_a_package_as_it_is(name, tmp_path):
    opened, folder, *_ = package(tmp_path, name)
    assert token_problems(opened, folder) == []


def test_what_makes_other_ids_is_named(tmp_path):
    opened, folder, values, settings = package(tmp_path, "v5/bert")
    by_content = {entry["content"]: entry for entry in values["added_tokens"]}
    by_content["[E1]"]["special"] = True
    written(folder, values)
    (problem,) = token_problems(opened, folder)
    assert problem.startswith("tokenizer.json: cuts '[E1]' into")
    by_content["[E1]"]["special"] = False
    by_content["<hole>"]["lstrip"] = True
    pair = values["post_processor"]["pair"]
    pair.append(pair.pop(0))
    written(folder, values)
    (problem,) = token_problems(opened, folder)
    assert problem.startswith("tokenizer.json: joins")
    pair.insert(0, pair.pop())
    written(folder, values)
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "split_special_tokens": False}))
    (problem,) = token_problems(opened, folder)
    assert problem.startswith("tokenizer.json: is cut by `tokenizers` otherwise: 'a [PAD] b'")
    (folder / "tokenizer.json").write_text("{")
    (problem,) = token_problems(opened, folder)
    assert "can't be read" in problem


@pytest.mark.parametrize("name", ["v5/modernbert", "v4/pegasus", "v5/t5", "v5/bert"])
def test_a_lost_normaliser_is_named(name, tmp_path):
    opened, folder, values, _ = package(tmp_path, name)
    written(folder, {**values, "normalizer": None})
    (problem,) = token_problems(opened, folder)
    assert problem.startswith("tokenizer.json: cuts")
