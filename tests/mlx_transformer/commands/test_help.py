"""The help of every command (`--help-all`, where there is that), on 100 columns, is in the files of `help/`, so that a
change of it is read.

They are written anew by: python tests/mlx_transformer/commands/test_help.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from mlx_transformer.commands.app import ALL

FILES = Path(__file__).parent / "help"
PROGRAMS = {"mlx-transformer": ["", *ALL], "python -m export": [""]}
SHOWN_BY = "8.5.1"
"""The version of click that drew the files (constraints.txt)."""
CODE = """
import contextlib, io, json, sys
from mlx_transformer.commands.app import command_of, invoke
def options(program, name):
    params = command_of(program).commands[name].params if name else ()
    return {option for each in params for option in each.opts}
shown = {}
for program, names in json.loads(sys.argv[1]).items():
    for name in names:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            option = "--help-all" if "--help-all" in options(program, name) else "--help"
            assert invoke(program, [*filter(None, [name]), option]) == 0
        lines = (line.rstrip() for line in out.getvalue().strip().splitlines())
        shown[name or program.replace(" -m ", "-")] = "\\n".join(lines) + "\\n"
print(json.dumps(shown))
"""


def helps() -> dict[str, str]:
    """{file: text} of both programs and of all commands."""
    width = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    environment = {**{name: text for name, text in os.environ.items() if name != "FORCE_COLOR"}, **width}
    arguments = [sys.executable, "-c", CODE, json.dumps(PROGRAMS)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, encoding="utf-8", check=True)
    return {f"{name.replace(' ', '-')}.txt": text for name, text in json.loads(done.stdout).items()}


@pytest.mark.skipif(version("click") != SHOWN_BY, reason=f"the files were drawn by click {SHOWN_BY}")
def test_help_is_what_the_files_show():
    shown = helps()
    assert sorted(shown) == sorted(file.name for file in FILES.iterdir())
    for name, text in shown.items():
        assert text == (FILES / name).read_text(encoding="utf-8"), f"{name}: read the difference; {__doc__}"


if __name__ == "__main__":
    shown = helps()
    for file in FILES.iterdir():
        file.unlink()
    for name, text in shown.items():
        (FILES / name).write_text(text, encoding="utf-8")
