"""The edge of the process: any encoding, closed streams, Ctrl-C at any moment, and exit statuses that never lie."""

from __future__ import annotations

import _thread
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from combined import SLOW, thinned, thinned_rows
from command_line import PROGRESS, both_models
from forked import Process
from tiny_run import COMMAND, start
from waiting import PATIENCE

from mlx_transformer.system.errors import UserError
from mlx_transformer.system.process import FAULT, run

made = pytest.fixture(scope="module")(both_models)
EXPORT = [sys.executable, "-m", "export"]


def status_of(error: BaseException, capsys) -> tuple[int, str]:
    def command() -> int:
        raise error

    return run("program", command, whole=False), capsys.readouterr().err


class PanicException(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("two\nlines"), 2, "two lines"),
        (UserError("\x1b[2J\0\u202efile: größer 日本"), 2, "?[2J??file: größer 日本"),
        (PermissionError(13, "Permission denied", "some/file"), 2, "some/file: Permission denied"),
        (OSError(28, "No space left on device"), 2, "standard output: No space left on device"),
        (MemoryError("of 9 TB"), 2, "out of memory (of 9 TB)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ModuleNotFoundError("No module named 'mlx'", name="mlx.core"),
            2,
            "this needs mlx: pip install -e '",
        ),
        (PanicException("index out of range"), 2, "a library could not take this input (index out of range)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_person_can_mend_is_one_line(capsys, error, status, said):
    found, err = status_of(error, capsys)
    assert found == status
    assert err.startswith(f"program: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("of what"), ImportError("half of it"), AssertionError()])
def test_a_fault_of_the_program_is_no_verdict(capsys, error):
    status, err = status_of(error, capsys)
    assert status == FAULT == 70  # and not the 1 of a mismatch
    assert "Traceback" in err
    last = err.splitlines()[-1]
    assert last.startswith(f"program: this is a bug in mlx-transformer: {type(error).__name__}")
    assert "report" in last


def test_an_error_made_of_an_interruption_is_one(capsys):
    def command() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None
        return 0

    assert run("program", command, whole=False) == 130
    assert capsys.readouterr().err == "program: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interruption_that_a_callback_swallows_comes_again(capsys):
    class Swallows:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def command() -> int:
        del [Swallows()][0]
        for _ in range(round(PATIENCE / 0.01)):
            time.sleep(0.01)
        return 0

    assert run("program", command, whole=False) == 130
    assert capsys.readouterr().err == "program: interrupted\n"


def test_an_interruption_waits_for_an_import(tmp_path, monkeypatch, capsys):
    """A module that would make another error of it, as some in C do."""
    (tmp_path / "takes_its_time.py").write_text(
        "import signal, sys\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise SystemError('initialization failed')\n"
        "done = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def command() -> int:
        import takes_its_time  # type: ignore[import-not-found]

        assert takes_its_time.done
        for _ in range(round(PATIENCE / 0.01)):
            time.sleep(0.01)
        return 0

    assert run("program", command, whole=False) == 130
    assert capsys.readouterr().err == "program: interrupted\n"
    assert sys.modules.pop("takes_its_time").done


def ended_by(code: str, *arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted_before_anything_has_begun():
    """And the handler of the first line gives way to that of the command."""
    early = "from mlx_transformer.system.early import stop_quietly\nstop_quietly('program')\n"
    raised = "import signal\nsignal.raise_signal(signal.SIGINT)"
    assert ended_by(early + raised) == (130, "program: interrupted\n")
    command = "from mlx_transformer.system.process import run\ndef command():\n    try:\n        "
    command += (
        "signal.raise_signal(signal.SIGINT)\n    finally:\n        print('cleaned', file=__import__('sys').stderr)\n"
    )
    found = ended_by(f"{early}import signal\n{command}raise SystemExit(run('program', command))")
    assert found == (130, "cleaned\nprogram: interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted_in_code_from_a_string():
    """As annotations are evaluated: Python would end by the signal, after all is said."""
    command = "lambda: eval('__import__(\"signal\").raise_signal(2)')"
    found = ended_by(f"from mlx_transformer.system.process import run\nraise SystemExit(run('program', {command}))")
    assert found == (130, "program: interrupted\n")


@pytest.mark.fast("numpy")
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    "module", thinned(["onnxruntime.capi.onnxruntime_pybind11_state", "onnxruntime", "numpy", "click"], 2)
)
def test_interrupted_while_a_library_is_imported(made, module):
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from mlx_transformer.cli import main\n"
        "main()"
    )
    text = "one two three\n" * 9
    assert ended_by(code, "translate", made / "onnx", *text.splitlines()) == (130, "mlx-transformer: interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted_in_an_import_after_which_nothing_is_left_to_do():
    """The look whether the import is done may come too late on a busy machine."""
    code = (
        "import os, signal, sys, types\n"
        "from mlx_transformer.system import early, process\n"
        "early.POLL_SECONDS = 60\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'colorsys':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "def command():\n"
        "    import colorsys\n"
        "status = process.run('program', command)\n"
        "sys.stderr.flush()\n"
        "os._exit(status)\n"
    )
    assert ended_by(code) == (130, "program: interrupted\n")


def test_signals_of_others_are_left_alone():
    """Ignored (a job in the background), or in a thread that has no say in it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run("program", lambda: signal.raise_signal(signal.SIGINT), whole=False) == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    found: list[int] = []
    _thread.start_new_thread(lambda: found.append(run("program", lambda: 0, whole=False)), ())
    for _ in range(round(PATIENCE / 0.01)):
        if found:
            break
        time.sleep(0.01)
    assert found == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "encoding"),
    thinned_rows([(EXPORT, "cp1252"), (COMMAND, "latin1"), (COMMAND, "ascii"), (EXPORT, "utf-8")], 4),
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_any_encoding_of_the_terminal(made, command, encoding):
    arguments = ["validate", made / "model", made / "onnx", "--runtimes", "onnxruntime", "--seed", "1"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, env=environment, timeout=PATIENCE)
    assert (done.returncode, PROGRESS.sub("", done.stderr.decode(encoding))) == (0, "")
    marks = {"utf-8": "✓"}.get(encoding, "+")
    assert f"{marks} equal" in done.stdout.decode(encoding)


@pytest.mark.slow
def test_a_table_in_ascii(made):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    done = subprocess.run([*COMMAND, "info", made / "onnx"], capture_output=True, env=environment, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, b"")
    shown = done.stdout.decode("ascii")
    assert shown.startswith("+--")
    assert "~" not in shown, "nothing is cut"


def with_streams(command: list[str], streams: str, text: str = "") -> tuple[int, str, str]:
    """A command with the shell's redirections, such as `<&-`."""
    shell = ["sh", "-c", f'"$@" {streams}', "sh", *map(str, command)]
    done = subprocess.run(shell, capture_output=True, input=text, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="redirections of a shell")
@pytest.mark.parametrize("program", thinned([COMMAND, EXPORT], 2), ids=["its own", "export's"])
def test_closed_streams_of_a_translation(made, program):
    command = [*program, "translate", made / "onnx"]
    status, out, said = with_streams(command, "<&-")
    assert (status, out, said.count("\n")) == (2, "", 1)
    assert said.endswith(": standard input is closed; give a file with --input\n")
    status, _, said = with_streams(command, ">&-", "one\n")
    assert status == 2
    assert said.endswith(": standard output is closed; send it to a file, or to /dev/null\n")
    expected = with_streams(command, "", "one\n")[1]
    assert with_streams(command, "2>&-", "one\n") == (0, expected, "")
    assert with_streams(command, "<&- >&- 2>&-")[0] == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="redirections of a shell")
def test_closed_streams_of_what_needs_none(made):
    assert with_streams([*COMMAND, "info", made / "onnx"], "<&-")[0] == 0
    assert with_streams([*COMMAND, "info", "nowhere"], "2>&-") == (2, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
def test_an_output_without_room_is_named(made):
    for command in ("translate", "info"):
        status, _, said = with_streams([*COMMAND, command, made / "onnx"], "> /dev/full", "one\n")
        assert (status, said.count("\n")) == (2, 1)
        assert said.startswith("mlx-transformer: standard output: ")
        assert "No space left on device" in said


@pytest.mark.fast("True")
@pytest.mark.skipif(sys.platform == "win32", reason="pipes that tell their writers")
@pytest.mark.parametrize("help", [False, True])
def test_a_report_that_nobody_reads_is_no_mismatch(made, help):  # rich would end with 1
    reading, writing = os.pipe()
    os.close(reading)
    validate = ["validate", made / "model", made / "onnx", "--runtimes", "onnxruntime"]
    arguments = ["train", "--help"] if help else validate
    with start(*arguments, kind=Process, stdout=writing) as process:
        os.close(writing)
        assert process.wait(timeout=PATIENCE) == 141
        assert PROGRESS.sub("", process.stderr.read()) == ""


def test_an_interruption_after_the_end_changes_nothing():
    """Python takes its time to take itself down."""
    code = (
        "import atexit, os, signal, sys\n"
        "from mlx_transformer.cli import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['mlx-transformer', '--help']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.fast("0")
@pytest.mark.parametrize("moment", [0, 3, *(pytest.param(n, marks=SLOW) for n in (1, 2, 4, 5, 6, 7))])
def test_interrupted_at_any_moment(made, moment):
    """From the program's first line on: while Python itself starts, no program has a say."""
    text = made / "long"
    text.write_text("one two three\n" * 20_000)
    early = "from mlx_transformer.system.early import stop_quietly\nstop_quietly('mlx-transformer')"
    code = f"{early}\nprint(1, flush=True)\n{COMMAND[2]}"
    arguments = ["translate", made / ("onnx", "model")[moment % 2], "--input", text]
    # What a full pipe has taken of the last line may end within a character.
    with start(*arguments, command=[sys.executable, "-c", code], kind=Process, errors="replace") as process:
        process.stdout.readline()  # and nothing more, so that it can't come to its end
        time.sleep(0.05 + random.uniform(moment, moment + 1) / 6)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, PROGRESS.sub("", said)) == (130, "mlx-transformer: interrupted\n")
