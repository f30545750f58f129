"""The command lines `mlx-transformer` and `python -m export`; the second has only the commands that need no MLX.

Only `commands/` joins the MLX side and the ONNX side. A command's module is imported when the command is chosen, and
the libraries that it computes with when it runs. So help and error messages are fast, and ONNX commands work without
MLX.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from mlx_transformer.system.errors import CommandLine, Name, UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import click

    from mlx_transformer.system.errors import Spelling

    from .parameters import Command

PANELS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "quickstart": ("training:quickstart", "Train, score, export, prove and translate, in minutes."),
        "train": ("training:train", "Train a translator, or another model by --objective."),
        "launch": ("launching:launch", "Train in several processes."),
        "distil": ("converting:distil", "Train a small translator on a large one's translations."),
        "report": ("training:report", "Write a page about training runs: curves, samples, recipes."),
        "average": ("training:average", "Average the weights of several checkpoints of one run."),
    },
    "Use": {
        "translate": ("text:translate", "Translate text: one line in, one line out."),
        "evaluate": ("text:evaluate", "Score a model on text with references: BLEU, chrF, TER and others."),
        "score": ("text:score", "Print log-probabilities of given translations or texts."),
        "generate": ("text:generate", "Continue a prompt with a decoder."),
        "chat": ("text:chat", "Talk with a decoder, by its chat template."),
        "fill": ("text:fill", "Guess masked words with an encoder."),
        "embed": ("text:embed", "Turn text into vectors with an encoder."),
        "classify": ("text:classify", "Classify texts or pairs of texts."),
        "rerank": ("text:rerank", "Order documents by how well they fit a query."),
        "tag": ("text:tag", "Find names and other labelled parts of a text."),
        "answer": ("text:answer", "Find the part of a text that answers a question."),
    },
    "Deploy": {
        "export": ("exporting:export", "Write a checkpoint as ONNX models."),
        "validate": ("exporting:validate", "Prove that MLX, ONNX Runtime and a float64 reference agree."),
        "serve": ("text:serve", "Answer requests over HTTP."),
        "web": ("exporting:web", "Write a page that translates in the browser."),
    },
    "Look": {
        "explain": ("looking:explain", "Write a page that follows a sentence through a model."),
        "compare": ("looking:compare", "Compare two models on the same text: scores, speed, memory."),
        "info": ("looking:info", "Describe a model: config, sizes, parameters."),
        "claims": ("looking:claims", "Compute well-known claims about the Transformer (in a clone)."),
    },
    "Convert": {
        "import": ("converting:import_command", "Turn a published model into a checkpoint."),
        "to-huggingface": ("converting:to_huggingface_command", "Write a checkpoint for `transformers`."),
        "to-peft": ("converting:to_peft_command", "Write an adapter for PEFT."),
        "to-gguf": ("converting:to_gguf_command", "Write a checkpoint for llama.cpp."),
        "to-marian": ("converting:to_marian_command", "Write a checkpoint for Marian, Bergamot and Firefox."),
        "shortlist": ("converting:shortlist", "Write a shortlist of target tokens, for faster translation."),
        "quantize": ("converting:quantize", "Store a checkpoint's matrices as small integers."),
        "merge": ("converting:merge", "Merge an adapter into its base."),
        "push": ("converting:push", "Upload a model's folder to the Hugging Face Hub."),
    },
}
"""{panel: {command: (its module in this package and function there, its line in the list of commands)}}."""
ALL = {name: command for commands in PANELS.values() for name, command in commands.items()}
WITHOUT_MLX = "translate evaluate score generate chat fill embed classify rerank tag answer".split()
WITHOUT_MLX += "export validate serve web explain compare info push".split()
EXPORT = "python -m export"
BUILD = {"export": "build"}
"""{command of `mlx-transformer`: its name in `python -m export`}"""
PROGRAMS = {
    "mlx-transformer": (
        list(ALL),
        "Train a Transformer with MLX, deploy it as ONNX, and prove that both compute the same function.",
    ),
    EXPORT: (WITHOUT_MLX, "Export to ONNX, validate, and translate with ONNX Runtime: no MLX needed."),
}
VERSION = ("--version", "-V")
COMPLETE = "_MLX_TRANSFORMER_COMPLETE"
"""Environment variable with which a shell asks for completions."""

# (another program's name for an option, ours). Not shown in help; accepted by every command that has the option.
USUAL = (
    *(("--backend", "--runtime"), ("--output", "--out"), ("--lr", "--learning-rate"), ("--warmup-steps", "--warmup")),
    *(("--num-beams", "--beam"), ("--max-length", "--max-new-tokens"), ("--batch-size", "--batch")),
    *(("--batch-size", "--max-batch"), ("--max-batch-size", "--max-batch")),
)


class Commands(Mapping[str, "Command"]):
    """The commands of one of `PROGRAMS`; each is imported and built on first use."""

    def __init__(self, program: str):
        self._homes = {_spelled_in(program, name): ALL[name][0] for name in PROGRAMS[program][0]}
        self._made: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        if name not in self._made:
            self._made[name] = _made(name, _function_at(self._homes[name]))
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def function_of(name: str) -> Callable[..., Any]:
    """Import a command's function."""
    return _function_at(ALL[name][0])


def _function_at(home: str) -> Callable[..., Any]:
    module, _, function = home.partition(":")
    return getattr(import_module(f".{module}", __package__), function)


def _made(name: str, function: Callable[..., Any]) -> Command:
    from .parameters import Command
    from .settings import with_settings

    command = Command(name, with_settings(function))
    options = {option for each in command.params for option in each.opts}
    command.spellings = {other: option for other, option in USUAL if option in options and other not in options}
    return command


def _spelled_in(program: str | None, name: str) -> str:
    return BUILD.get(name, name) if program == EXPORT else name


def _print_version(_: click.Context | None = None) -> None:
    from mlx_transformer import __version__

    print(f"mlx-transformer {__version__}")


def _completion(context: click.Context) -> None:
    from click.shell_completion import get_completion_class

    name = Path(os.environ.get("SHELL", "bash")).name
    completion = get_completion_class(name) or get_completion_class("bash")
    assert completion is not None
    print(completion(context.command, {}, "mlx-transformer", COMPLETE).source())


@functools.cache
def command_of(program: str) -> Any:
    """Return the click parser of one of `PROGRAMS`, made once per process."""
    from .parameters import Option, Program, click_parameter

    names, help = PROGRAMS[program]
    options = {"version": Option(*VERSION, help="Print the version and exit.", prints=_print_version)}
    if " " not in program:  # shells complete only programs whose name is one word
        evaluated = f'eval "$({program} --show-completion)"'
        meaning = f"Print code that completes commands and options in your $SHELL; to use it: {evaluated}"
        options["show_completion"] = Option("--show-completion", help=meaning, prints=_completion)
    kind = inspect.Parameter.KEYWORD_ONLY
    params = [
        click_parameter(inspect.Parameter(name, kind, default=False, annotation=Annotated[bool, option]))
        for name, option in options.items()
    ]
    panels = {
        panel: {_spelled_in(program, name): line for name, (_, line) in commands.items() if name in names}
        for panel, commands in PANELS.items()
    }
    return Program(program, panels, Commands(program), params=params, help=help)


def invoke(program: str, arguments: list[str]) -> int:
    """Run a command and return its exit status. Raises `UserError` for anything wrong with its options."""
    if len(arguments) == 1 and arguments[0] in VERSION:  # a shortcut: importing the parser would take longer
        _print_version()
        return 0
    import click

    if COMPLETE in os.environ:
        command_of(program).main(arguments, prog_name=program, complete_var=COMPLETE)  # a shell asks for completions
    called = next((text for text in arguments if not text.startswith("-")), "")
    command = command_of(program)
    try:
        with command.make_context(program, arguments or ["--help"]) as context:
            command.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else program
        reason = " ".join(error.format_message().split())
        raise UserError(f"{reason} (see {path} --help)") from None
    except UserError as error:
        parameters = command.commands[called].params if called in command.commands else ()
        error.args = (error.said(spelling_of(program, parameters)),)
        raise
    return 0


def spelling_of(program: str, parameters: Iterable[Any]) -> Spelling:
    """Return a function that spells options and commands in error messages as people type them in this program."""
    from .settings import NOT

    options = {each.name: each for each in parameters if any(name.startswith("--") for name in each.opts)}

    def spelled(part: Name | CommandLine) -> str:
        if isinstance(part, CommandLine):
            there = EXPORT if program == EXPORT and part.name in WITHOUT_MLX else "mlx-transformer"
            return f"{there} {_spelled_in(there, part.name)} {part.arguments}".rstrip()
        turned_off = options.get(f"{NOT}{part.name}") if part.value == "False" else None
        option = turned_off or options.get(part.name)
        if option is None:
            return str(part)
        name = next(name for name in option.opts if name.startswith("--"))
        if part.value is None or turned_off or option.is_flag:
            return f"no {name}" if part.value == "False" and not turned_off else name
        return f"{name} {part.value}"

    return spelled
