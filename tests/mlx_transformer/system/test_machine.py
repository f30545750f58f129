"""Memory that isn't there is never asked for."""

from __future__ import annotations

import pytest
from toy_model import Toy

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.search import search
from mlx_transformer.system import machine as module
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import check_memory, free_cores, memory, usable_cores
from mlx_transformer.training.setup import check_fits


def test_the_machine_has_some():
    assert 1 << 28 < memory() < 1 << 50


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("123456789\n")
    monkeypatch.setattr(module, "CGROUP", tmp_path / "memory.max")
    assert memory() == 123456789
    (tmp_path / "memory.max").write_text("max\n")
    assert memory() > 123456789


def test_what_does_not_fit_is_told(monkeypatch):
    monkeypatch.setattr(module, "memory", lambda: 10**9)
    check_memory(10**9, "this", "less")
    with pytest.raises(UserError, match=r"^this needs 2\.5 GB of memory, and there are 1\.0 GB: less$"):
        check_memory(2.5e9, "this", "less")


@pytest.mark.parametrize(("running", "free"), [("1/80", 2), ("2/80", 1), ("3/80", 0), ("9/80", 0)])
def test_free_cores_are_those_nobody_else_computes_on(running, free, tmp_path, monkeypatch):
    loads = tmp_path / "loadavg"
    loads.write_text(f"0.20 0.18 0.12 {running} 11206\n")
    monkeypatch.setattr(module, "LOADS", loads)
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    assert free_cores() == free


def test_all_cores_count_as_free_where_the_system_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOADS", tmp_path / "missing")
    assert free_cores() == usable_cores()


def test_training_and_decoding_ask(monkeypatch):
    monkeypatch.setattr(module, "memory", lambda: 50_000)
    monkeypatch.setattr(module, "FEW", 0)
    with pytest.raises(UserError, match=r"training 44,\d{3},\d{3} parameters needs 0\.7 GB"):
        check_fits(TransformerConfig.preset("base", 260))
    assert search(Toy(), [[3, 2]], beam=2)
    with pytest.raises(UserError, match=r"decoding 52 tokens needs .*: lower beam=8"):
        search(Toy(), [[3, 2]], beam=8)
