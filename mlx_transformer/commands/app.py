"""The command lines `mlx-transformer` and `python -m export`: one set of commands, the second without those of MLX.

With `commands/` the one place that joins the MLX side and the ONNX side. Each command imports what it needs when it
runs, and its options are made when it is called, so `--help` is instant and the ONNX commands work without MLX.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mlx_transformer.system.errors import UserError

from . import converting, distilling, exporting, heads, language, launching, looking, text, training
from .settings import with_settings

PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "quickstart": training.quickstart,
        "train": training.train,
        "launch": launching.launch,
        "distil": distilling.distil,
        "report": training.report,
        "average": training.average,
    },
    "Use": {
        "translate": text.translate,
        "evaluate": text.evaluate,
        "score": text.score,
        "generate": language.generate,
        "fill": language.fill,
        "embed": language.embed,
        "classify": heads.classify,
        "rerank": heads.rerank,
        "tag": heads.tag,
        "answer": heads.answer,
    },
    "Deploy": {
        "export": exporting.export,
        "validate": exporting.validate,
        "serve": text.serve,
        "web": exporting.web,
    },
    "Look": {
        "explain": looking.explain,
        "compare": looking.compare,
        "info": looking.info,
        "claims": looking.claims,
    },
    "Convert": {
        "import": converting.import_command,
        "to-huggingface": converting.to_huggingface_command,
        "to-marian": converting.to_marian_command,
        "shortlist": converting.shortlist,
        "quantize": converting.quantize,
        "merge": converting.merge,
        "push": converting.push,
    },
}
ALL = {name: command for commands in PANELS.values() for name, command in commands.items()}
WITHOUT_MLX = "translate evaluate score generate fill embed classify rerank tag answer".split()
WITHOUT_MLX += "export validate serve web explain compare info push".split()
EXPORT = "python -m export"
BUILD = {"export": "build"}
"""The name of a command there."""
USUAL_NAMES = {there: here for here, there in BUILD.items()}
PROGRAMS = {
    "mlx-transformer": (
        list(ALL),
        "Train a Transformer with MLX, deploy it as ONNX, and prove that both compute the same function.",
    ),
    EXPORT: (WITHOUT_MLX, "Export to ONNX, validate, and translate with ONNX Runtime: no MLX needed."),
}
HELP = ["-h", "--help"]

# Hidden spellings of options: those of earlier versions, by command, and the field's names, where a command has the
# option and no other of that name.
EARLIER = {
    "train": {"--rank": "--adapter-rank", "--alpha": "--adapter-alpha", "--targets": "--adapter-targets"}
    | {"--warmup-steps": "--warmup", "--start-from": "--from", "--checkpoint-seconds": "--save-every"},
    "launch": {"--backend": "--network"},
    "validate": {"--runtime": "--runtimes", "--backend": "--runtimes", "--out": "--html", "-o": "--html"},
    "score": {"--target": "--reference"},
    "explain": {"--target": "--translation"},
    "export": {"--text": "--embed-tokenizer"},
    "serve": {"--batch-size": "--max-batch", "--max-batch-size": "--max-batch"},
}
USUAL = {"--backend": "--runtime", "--output": "--out", "--lr": "--learning-rate", "--num-beams": "--beam"}
USUAL |= {"--max-length": "--max-new-tokens", "--batch-size": "--batch"}


class Command(TyperCommand):
    """A command that takes the hidden spellings of its options, and its first argument as `--model` too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        known = {name: option for name, option in USUAL.items() if option in options and name not in options}
        known |= EARLIER.get(USUAL_NAMES.get(self.name or "", self.name or ""), {})
        takes_model = "--model" not in options and bool(self.params) and self.params[0].name == "model"
        end = args.index("--") if "--" in args else len(args)
        read: list[str] = []
        for part in args[:end]:
            name, sign, value = part.partition("=")
            if takes_model and sign and name == "--model":
                read += [name, value]
            else:
                read.append(_spelled(name, options, known) + sign + value)
        if takes_model and "--model" in read[:-1]:
            at = read.index("--model")
            read = [read[at + 1], *read[:at], *read[at + 2 :]]
        return super().parse_args(ctx, [*read, *args[end:]])


def _spelled(name: str, options: Container[str], known: Mapping[str, str]) -> str:
    """Return an option as it is called here: `known` has other names of it, and Python's programs write `_` for `-`."""
    if name.startswith("--") and name not in options and "_" in name:
        name = name.replace("_", "-")
    return known.get(name, name)


def _described(command: Callable[..., Any]) -> Callable[[], None]:
    """Return a command in the list of all, with its description alone."""

    def described() -> None: ...

    described.__doc__ = command.__doc__
    return described


def _version(value: bool) -> None:
    if value:
        from mlx_transformer import __version__

        print(f"mlx-transformer {__version__}")
        raise typer.Exit()


def _program(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version, and end."),
    ] = False,
) -> None:
    """The options before any command."""


@functools.cache
def command_of(program: str, called: str | None = None) -> Any:
    """Return the parser of arguments for the commands of one of `PROGRAMS`; with options all of them, or only the one
    that is called. Made once, however often Python calls it."""
    names, help = PROGRAMS[program]
    app = typer.Typer(
        name=program,
        add_completion=" " not in program,  # a shell completes the arguments of one word
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": HELP},
    )
    app.callback(help=help)(_program)
    for panel, commands in PANELS.items():
        for name, command in commands.items():
            if name in names:
                spelled = BUILD.get(name, name) if program == EXPORT else name
                typed = with_settings(command) if called in (None, spelled) else _described(command)
                app.command(spelled, cls=Command, rich_help_panel=panel)(typed)
    parser: Any = typer.main.get_command(app)
    for each in (parser, *parser.commands.values()):
        for parameter in each.get_params(typer.Context(each, help_option_names=HELP)):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""  # else help says <bool>, as if a value had to follow
    return parser


def invoke(program: str, arguments: list[str]) -> int:
    """The command's exit status. Whatever is wrong with its options is a `UserError`."""
    if "_MLX_TRANSFORMER_COMPLETE" in os.environ:
        command_of(program).main(arguments, prog_name=program)  # a shell asks what may follow
    if arguments[:2] == ["explain", "claims"] and not os.path.exists("claims"):
        return invoke("mlx-transformer", arguments[1:])  # whose command it is now
    called = next((text for text in arguments if not text.startswith("-")), "")
    command = command_of(program, called)
    try:
        with command.make_context(program, arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _USAGE_ERROR as error:
        path = error.ctx.command_path if error.ctx is not None else program
        reason = " ".join(error.format_message().split()).replace(
            "Value error, ", ""
        )  # pydantic's word, which says nothing
        raise UserError(f"{reason} (see {path} --help)") from None
    except UserError as error:
        message = as_typed_in(program, str(error))
        if called in command.commands:
            message = as_options(message, options_of(command.commands[called].params), arguments)
        error.args = (message, *error.args[1:])
        raise
    return 0


def as_typed_in(program: str, message: str) -> str:
    """A message whose advice is what a person types who called this program."""
    here, there = (program, EXPORT if program != EXPORT else "mlx-transformer")
    for name in WITHOUT_MLX:
        ours, theirs = ((BUILD.get(name, name) if which == EXPORT else name) for which in (here, there))
        message = re.sub(rf"{there} {theirs}(?![\w-])", f"{here} {ours}", message)
    return message


def options_of(parameters: Iterable[Any]) -> dict[str, tuple[str, bool]]:
    """{argument of Python: (its option, whether that takes no value)}, of the parameters of a command."""
    options = {}
    for each in parameters:
        option = next((name for name in each.opts if name.startswith("--")), None)
        if option is not None:
            options[each.name] = (option, bool(getattr(each, "is_flag", False)))
    return options


def as_options(message: str, known: Mapping[str, tuple[str, bool]], spelled: Sequence[str]) -> str:
    """A message of the library, which names arguments of Python, with options for them: beam=0 is --beam 0. Text that
    the user has written himself (`spelled`), a path perhaps, stays."""
    for name, (option, flag) in known.items():
        if any(name in text for text in spelled if not text.startswith("-")):
            continue
        if flag:
            message = re.sub(rf"(?<![\w.-]){name}=True\b", option, message)
            message = re.sub(rf"(?<![\w.-]){name}=False\b", f"no {option}", message)
        else:
            message = re.sub(rf"(?<![\w.-]){name}=(?=\S)", f"{option} ", message)
        if "_" in name:  # a word of no other meaning; in quotes it is one of a file
            message = re.sub(rf"(?<![\w.'-]){name}\b(?!=)", option, message)
    return message


# Wrong options and arguments; typer exports only the classes below this one.
_USAGE_ERROR: Any = typer.BadParameter.__base__
