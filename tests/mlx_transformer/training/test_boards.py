"""Curves that go elsewhere too: TensorBoard by itself, Weights & Biases where a project is named. The package of the
latter is played by a module that writes down what it is told."""

import sys
from types import SimpleNamespace

import pytest

from mlx_transformer.system.errors import UserError
from mlx_transformer.training import run_folder as boards
from mlx_transformer.training.recipe import load_recipe
from mlx_transformer.training.trainer import Trainer


@pytest.fixture
def told(monkeypatch):
    """What the package is told: (id, project, what was logged)."""
    runs = []

    def init(*, project, id, resume, dir, name, config):
        logged = []
        runs.append((id, project, config, logged))
        return SimpleNamespace(
            log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end")
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=SimpleNamespace(name="wandb")))
    return runs


def run(folder, steps, resume=False, wandb="letters"):
    (folder / "x").write_text("".join(f"{i} a b c\n" for i in range(50)))
    flags = {
        "data": {"source": str(folder / "x"), "target": str(folder / "x"), "vocab_size": 300},
        "model": {"preset": "tiny"},
        "training": {"steps": steps, "log_every": 1, "valid_every": 2, "wandb": wandb},
    }
    return Trainer(load_recipe(None, flags), folder / "run", resume).run()


@pytest.mark.slow
def test_a_run_is_one_run_there_also_when_it_is_resumed(tmp_path, told):
    run(tmp_path, 2)
    run(tmp_path, 2, resume=True)
    (first, project, config, logged), *more = told
    assert project == "letters"
    assert config["recipe"]["training"]["steps"] == 2
    assert [step for step, values in logged[:-1] if "train/loss" in values] == [1, 2]
    assert [step for step, values in logged[:-1] if "valid/loss" in values] == [2]
    assert logged[-1] == "end"
    assert all(id == first for id, *_ in more)
    assert (tmp_path / "run" / boards.WANDB_ID).read_text(encoding="utf-8").strip() == first


def test_a_project_without_the_package_is_refused_before_the_text_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(boards, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="isn't installed; pip install wandb"):
        run(tmp_path, 1)


def test_what_the_package_refuses_is_one_line(tmp_path, monkeypatch, told):
    def refuse(**_):
        raise RuntimeError("no api key\nconfigured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(UserError, match=r"wandb = 'letters': no api key configured; WANDB_MODE=offline"):
        run(tmp_path, 1)


def test_without_a_project_nothing_is_told(tmp_path, told):
    run(tmp_path, 1, wandb=None)
    assert told == []
    assert not (tmp_path / "run" / boards.WANDB_ID).exists()
