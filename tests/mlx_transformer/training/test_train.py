"""`mlx_transformer.train`: what the command does, from Python."""

from __future__ import annotations

import pytest
from tiny_run import MODEL, write_pairs

import mlx_transformer
from mlx_transformer.system.errors import UserError
from mlx_transformer.training.options import recipe_keys, tables_of


def test_keys_come_to_their_tables():
    names = [name for _, name, _ in recipe_keys()]
    assert len(set(names)) == len(names), "a name stands in two tables"
    assert tables_of({"steps": 3, "d_model": 8, "preset": "tiny", "vocab_size": 300}) == {
        "data": {"vocab_size": 300},
        "model": {"d_model": 8, "preset": "tiny"},
        "training": {"steps": 3},
    }
    with pytest.raises(UserError, match="train: unknown key 'step'; did you mean 'steps'"):
        tables_of({"step": 3})


def test_a_run_from_python(tmp_path):
    source, target = map(str, write_pairs(tmp_path))
    keys = {**MODEL, "source": source, "target": target, "vocab_size": 260, "batch_tokens": 200, "valid_sentences": 0}
    result = mlx_transformer.train(out=tmp_path / "run", steps=2, **keys)
    assert (result.model, result.state.step, result.interrupted) == (tmp_path / "run" / "model", 2, None)
    with pytest.raises(UserError, match="already holds a run"):
        mlx_transformer.train(out=tmp_path / "run", steps=2, **keys)
    assert mlx_transformer.train(out=tmp_path / "run", resume=True, steps=3).state.step == 3
    model, tokenizer = mlx_transformer.load(result.model)
    assert (model.config.d_model, tokenizer.vocab_size) == (16, 260)
    (tmp_path / "my.toml").write_text(f'[data]\nsource = "{source}"\ntarget = "{target}"\n', encoding="utf-8")
    small = {**MODEL, "vocab_size": 260, "batch_tokens": 200, "valid_sentences": 0, "steps": 1}
    assert mlx_transformer.train(tmp_path / "my.toml", out=tmp_path / "run", force=True, **small).state.step == 1
