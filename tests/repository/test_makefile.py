"""Every target that `make help` names, or that is declared phony, has a rule that does something."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
HELPED = set(re.findall(r"^\t@echo 'make ([a-z0-9-]+) ", TEXT, re.MULTILINE)) | {"setup-dev", "clean-venv"}
PHONY = set(re.search(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE).group(1).split())
RULES = dict(re.findall(r"^([a-z0-9-]+):(.*\n(?:\t.*\n)*)", TEXT, re.MULTILINE))


@pytest.mark.parametrize("name", sorted(HELPED | PHONY))
def test_a_target_does_something(name):
    assert name in RULES, f"make {name}: no rule"
    prerequisites, _, recipe = RULES[name].partition("\n")
    assert recipe.strip() or prerequisites.strip()


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
@pytest.mark.parametrize(("stamp", "extras"), [(".installed", "train,export,serve"), (".installed-dev", "dev")])
def test_the_environment_gets_the_extras(stamp, extras):
    """As make expands it: a comma in an argument of `call` ends that argument."""
    command = ["make", "--dry-run", "--always-make", f".venv/{stamp}"]
    said = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout
    assert f"-c constraints.txt -e '.[{extras}]'" in said
