"""A mechanism that is taken out is seen by the tests of the row that claims it. The fast part: each is still of a text
that is there; `make mutations-claims` runs them all."""

from pathlib import Path

import pytest
from claim_mutations import CHANGES, Change
from claim_run import copy_project, named_tests, run
from imports import ROOT


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_taken_out_is_there(name: str) -> None:
    change = CHANGES[name]
    assert change.old in (ROOT / change.file).read_text(encoding="utf-8")
    assert change.old != change.new
    assert named_tests(change)


@pytest.mark.slow
def test_one_is_seen_and_what_changes_nothing_is_not(tmp_path: Path) -> None:
    project = copy_project(tmp_path)
    seen = run("ReLU an identity", CHANGES["ReLU an identity"], project)
    assert not seen.wrong
    assert "test_the_numbers_hold[25]" in seen.tests
    idle = run(
        "idle",
        Change(25, CHANGES["ReLU an identity"].file, "return mx.maximum(x, 0)", "return mx.maximum(0, x)"),
        project,
    )
    assert idle.wrong == "no test of its row failed"
    gone = run("gone", Change(25, CHANGES["ReLU an identity"].file, "no such text", ""), project)
    assert "has no" in gone.wrong
