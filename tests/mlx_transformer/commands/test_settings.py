"""Settings objects as options, and the two command lines that are made of the same commands."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import get_args

import pytest
import typer
from waiting import PATIENCE

from export.precision.table import ACTIVATIONS, PRECISIONS
from export.settings import TARGET_NAMES, ActivationsName, PrecisionName, ServeSettings, ValidateSettings
from export.targets.table import TARGETS
from mlx_transformer.commands import arguments
from mlx_transformer.commands.app import ALL, ONNX, app_of
from mlx_transformer.commands.settings import with_settings
from mlx_transformer.generation import options, pairs, translate
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import meanings_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    how_many: int | None = None
    """How many; unset: all."""
    loud: bool = False
    """Say more."""
    check: bool = True
    """Check it first."""


@with_settings
def command(what: str, *, settings: Settings, last: int = 3) -> list[object]:
    """Do it."""
    return [what, settings, last]


def test_fields_become_options():
    assert command(what="x", how_many=2, loud=True, no_check=True, last=4) == [
        "x",
        Settings(how_many=2, loud=True, check=False),
        4,
    ]
    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["what", "how_many", "loud", "no_check", "last"]
    assert (parameters["how_many"].default, parameters["no_check"].default) == (None, False)
    assert get_args(parameters["how_many"].annotation)[0] == int | None


def test_options_on_the_command_line():
    app = typer.Typer(add_completion=False)
    app.command()(command)
    shown = {each.name: each for each in typer.main.get_command(app).params}
    assert {name: each.opts for name, each in shown.items() if name != "what"} == {
        "how_many": ["--how-many"],
        "loud": ["--loud"],
        "no_check": ["--no-check"],
        "last": ["--last"],
    }
    assert not [each.secondary_opts for each in shown.values() if each.secondary_opts]  # such as --no-loud
    help = {name: each.help for name, each in shown.items()}  # type: ignore[attr-defined]
    assert help | {"what": None, "last": None} == {
        "what": None,
        "how_many": "How many.",
        "loud": "Say more.",
        "no_check": "Do not check it first.",
        "last": None,
    }
    assert shown["how_many"].show_default == "all"  # type: ignore[attr-defined]


def test_help_stands_under_every_field():
    for of in (ServeSettings, ValidateSettings, arguments.TranslateSettings, arguments.RuntimeSettings):
        assert list(meanings_of(of)) == [field.name for field in fields(of)]
        assert all(text.endswith(".") for text in meanings_of(of).values()), of


def test_what_help_shows_is_what_the_library_takes():
    """They are written down twice so that help needs neither NumPy nor onnx."""
    ours = {field.name: field.default for field in fields(arguments.TranslateSettings)}
    theirs = {field.name: field.default for field in fields(options.Options)}
    assert {**ours, "batch_tokens": theirs["batch_tokens"]} == theirs
    assert get_args(arguments.PenaltyForm) == get_args(options.PenaltyForm) == tuple(options.PENALTY_OFFSETS)
    assert get_args(arguments.OverlongPair) == get_args(pairs.OverlongPair)
    assert get_args(arguments.Overlong) == get_args(translate.Overlong)
    assert tuple(TARGETS) == TARGET_NAMES
    assert get_args(PrecisionName) == tuple(PRECISIONS)
    assert get_args(ActivationsName) == tuple(ACTIVATIONS)


def test_both_programs_have_the_same_commands():
    assert ONNX["build"] is ALL["export"]
    assert {name: ALL[name] for name in ONNX if name != "build"} == {n: c for n, c in ONNX.items() if n != "build"}
    found = typer.main.get_command(app_of("python -m export")).commands  # type: ignore[attr-defined]
    assert list(found) == list(ONNX)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"max_batch": 0}, "max_batch=0 must be a whole number of at least 1"), ({"host": None}, "host=None")],
)
def test_settings_out_of_bounds(wrong, said):
    with pytest.raises(UserError, match=said):
        ServeSettings(**wrong)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("name", ONNX)
def test_help_without_mlx_and_without_what_models_need(name):
    blocked = ["mlx", "mlx.core", "numpy", "onnx", "onnx_ir", "onnxruntime", "safetensors", "tokenizers"]
    code = f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\nfrom export.__main__ import main\n"
    done = python(f"{code}raise SystemExit(main([{name!r}, '--help']))")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: python -m export {name}" in done.stdout


def test_without_typer():
    done = python(
        "import sys\nsys.modules['typer'] = None\n"
        "from export.__main__ import main\nraise SystemExit(main(['info', 'x']))"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "python -m export: typer, which reads the command line, is not installed: pip install typer\n"
    )
