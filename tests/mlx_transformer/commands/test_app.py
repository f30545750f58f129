"""What holds for every command of both programs: help, spellings, one line for a mistake, words of the program."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from command_line import caller, refused
from waiting import PATIENCE

from mlx_transformer.commands.app import (
    ALL,
    BUILD,
    EXPORT,
    PANELS,
    PROGRAMS,
    USUAL,
    command_of,
)

call = pytest.fixture(caller)
COMMANDS: dict[str, Any] = command_of("mlx-transformer").commands
BOTH = [
    (program, BUILD.get(name, name) if program == EXPORT else name)
    for program, (names, _) in PROGRAMS.items()
    for name in names
]
HEAVY = ["mlx", "mlx.core", "numpy", "onnx", "onnx_ir", "onnxruntime", "safetensors", "tokenizers"]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)


def test_both_programs_have_the_same_commands():
    theirs = command_of(EXPORT).commands
    assert list(COMMANDS) == [name for commands in PANELS.values() for name in commands]
    for name, command in theirs.items():
        ours = COMMANDS["export" if name == "build" else name]
        assert [each.opts for each in command.params] == [each.opts for each in ours.params]
    assert set(theirs) == {name for program, name in BOTH if program == EXPORT}


def test_help_needs_nothing_that_takes_time():
    """Neither MLX, nor what models are run and read with, is imported for it."""
    code = (
        f"import sys, io, contextlib\nsys.modules.update(dict.fromkeys({HEAVY}))\n"
        "from mlx_transformer.commands.app import invoke\n"
        f"for program, name in {BOTH}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        assert invoke(program, [name, '--help']) == 0\n"
        "    assert f'Usage: {program} {name}' in out.getvalue()\n"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


MODULES = {f"mlx_transformer.commands.{home.partition(':')[0]}" for home, _ in ALL.values()}


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        ("trian", set()),
        ("average nowhere nowhere -o x", {"mlx_transformer.commands.training"}),
    ],
)
def test_a_command_is_imported_when_it_is_chosen(arguments, imported):
    """And no library that takes time, before what was typed is known to be right."""
    code = (
        "import sys\nfrom mlx_transformer.cli import main\ntry:\n"
        f"    main({arguments.split()})\nexcept SystemExit:\n    pass\n"
        f"print(*(name for name in {sorted({*MODULES, *HEAVY, 'rich'})} if name in sys.modules))"
    )
    assert set(python(code).stdout.splitlines()[-1].split()) == imported


MISTAKES = [
    *(
        "translate nowhere text",
        "embed nowhere text",
        "info nowhere",
        "validate nowhere nowhere",
        "serve en-de=nowhere",
    ),
    *("export nowhere x", "import nowhere x", "push nowhere a/b", "report nowhere", "explain nowhere x", "web nowhere"),
    *(
        "train nowhere.toml -o x",
        "train --source nowhere -o x",
        "train",
        "translate . -i nowhere",
        "average nowhere -o x",
    ),
    *(
        "evaluate . --source nowhere --reference nowhere",
        "compare . . --source nowhere",
        "distil nowhere --source x -o x",
    ),
    *("merge nowhere nowhere -o x", "quantize nowhere x", "to-huggingface nowhere x", "to-marian nowhere x"),
    "to-gguf nowhere x",
]


def test_a_mistake_is_told_before_anything_that_takes_time():
    """A model, recipe or text that isn't there, without NumPy, MLX and the like."""
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({[*HEAVY, 'rich']}))\n"
        f"from mlx_transformer.cli import main\nfor words in {MISTAKES}:\n"
        "    try:\n        main(words.split())\n    except SystemExit as end:\n        assert end.code == 2, words\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    assert len(told) == len(MISTAKES), told
    assert not [line for line in told if "nowhere" not in line and "--out" not in line]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_mistake_is_one_line(call, tmp_path, monkeypatch, name):
    """No traceback, the program's name before it, exit 2; nothing is written."""
    monkeypatch.chdir(tmp_path)
    needed = [each for each in COMMANDS[name].params if each.required]
    if needed:
        refused(call(name), "Missing", "--help")
    refused(call(name, "--nonsense"), "--nonsense")
    for each in COMMANDS[name].params:
        option = each.opts[0]
        if option.startswith("--") and not each.is_flag:
            refused(call(name, option), option, "requires an argument")
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_named_by_out_in_every_command():
    writers = {name: {each.name for each in command.params} for name, command in COMMANDS.items()}
    nothing = {"launch", "generate", "chat", "validate", "serve", "info", "push"}
    assert {name for name, params in writers.items() if "out" not in params} == nothing
    for name in COMMANDS.keys() - nothing:
        spelled = {option for each in COMMANDS[name].params for option in each.opts}
        assert {"--out", "-o"} <= spelled, name


SPELLINGS = [
    (name, old, new)
    for name, command in COMMANDS.items()
    for old, new in USUAL
    if new in (options := {option for each in command.params for option in each.opts}) and old not in options
]


@pytest.mark.parametrize(("name", "old", "new"), SPELLINGS)
def test_usual_spellings_are_the_option(name, old, new):
    command = COMMANDS[name]
    shown = {option: each for each in command.params for option in each.opts}
    assert old not in shown, "help doesn't show it"
    option = shown[new]
    value = [] if option.is_flag else ["onnx" if new == "--runtime" else "1"]

    def parsed(spelled: str, joined: bool = False) -> Any:
        words = [f"{spelled}={value[0]}"] if joined else [spelled, *value]
        context = command.make_context(name, words, resilient_parsing=True)
        return context.params[option.name]

    expected = parsed(new)
    assert expected not in (None, False)
    assert parsed(old) == expected
    if value:
        assert parsed(old, joined=True) == parsed(new, joined=True)


def test_underscores_are_read_as_in_options(call):
    """As in `transformers`' and fairseq's scripts."""
    refused(call("translate", "nowhere", "--num_beams=0"), "--beam 0 must be")
    refused(call("translate", "nowhere", "--max_length", 4), "nowhere: no such folder")
    refused(call("translate", "nowhere", "--", "--top_p"), "nowhere: no such folder")


def test_a_choice_that_is_none_is_told_the_others(call):
    said = call("train", "--preset", "huge")[2]
    assert "'huge' is not one of 'tiny', 'small'" in said
    assert "Value error" not in said


def test_a_model_is_an_option_too(call):
    refused(call("translate", "text", "--model", "nowhere"), "nowhere: no such folder")
    refused(call("translate", "--model=nowhere", "text"), "nowhere: no such folder")
    refused(call("translate", "text", "--model"), "--model")
    refused(call("info", ".", "--model", "nowhere"), "No such option", "--model")


def test_without_click():
    done = python(
        "import sys\nsys.modules['click'] = None\n"
        "from export.__main__ import main\nraise SystemExit(main(['info', 'x']))"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "python -m export: click, which the command line needs, is not installed: pip install click\n"
    )
