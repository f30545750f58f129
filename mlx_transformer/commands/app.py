"""The command lines `mlx-transformer` and `python -m export`: one set of commands, the second without those of MLX.

With `commands/` the one place that joins the MLX side and the ONNX side. Each command imports what it needs when it
runs, so `--help` is instant and the ONNX commands work without MLX.
"""

from __future__ import annotations

import functools
import os
from typing import Annotated, Any

import typer

from mlx_transformer.system.errors import UserError

from . import claims, comparing, converting, explaining, exporting, language, launching, text, training, web
from .spelling import spelled, spellings

ALL = {
    "quickstart": training.quickstart,
    "train": training.train,
    "launch": launching.launch,
    "report": training.report,
    "average": training.average,
    "translate": text.translate,
    "evaluate": text.evaluate,
    "score": text.score,
    "compare": comparing.compare,
    "generate": language.generate,
    "fill": language.fill,
    "export": exporting.export,
    "validate": exporting.validate,
    "explain": explaining.explain,
    "claims": claims.claims,
    "serve": text.serve,
    "web": web.web,
    "import": converting.import_command,
    "to-huggingface": converting.to_huggingface_command,
    "quantize": converting.quantize,
    "merge": converting.merge,
    "info": exporting.info,
}
WITHOUT_MLX = "validate explain translate evaluate score compare generate fill serve web info".split()
ONNX = {"build": exporting.export, **{name: ALL[name] for name in WITHOUT_MLX}}
HELP = ["-h", "--help"]
PROGRAMS = {
    "mlx-transformer": (
        ALL,
        "Train a Transformer with MLX, deploy it as ONNX, and prove that both compute the same function.",
    ),
    "python -m export": (ONNX, "Export to ONNX, validate, and translate with ONNX Runtime: no MLX needed."),
}


def app_of(program: str) -> typer.Typer:
    """The commands of one of `PROGRAMS`."""
    commands, help = PROGRAMS[program]
    app = typer.Typer(
        name=program,
        add_completion=" " not in program,  # a shell completes the arguments of one word
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": HELP},
    )
    app.callback(help=help)(_program)
    for name, command in commands.items():
        app.command(name)(command)
    return app


def _version(wanted: bool) -> None:
    if wanted:
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
def _command(program: str) -> Any:
    """What reads arguments: made once, however often Python calls it."""
    command: Any = typer.main.get_command(app_of(program))
    for each in (command, *command.commands.values()):
        for parameter in each.get_params(typer.Context(each, help_option_names=HELP)):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""  # else help says <bool>, as if a value had to follow
    return command


def invoke(program: str, arguments: list[str]) -> int:
    """The command's exit status. Whatever is wrong with its options is a `UserError`."""
    command = _command(program)
    if "_MLX_TRANSFORMER_COMPLETE" in os.environ:
        command.main(arguments, prog_name=program)  # a shell asks what may follow
    try:
        with command.make_context(program, arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _USAGE_ERROR as error:
        path = error.ctx.command_path if error.ctx is not None else program
        raise UserError(f"{' '.join(error.format_message().split())} (see {path} --help)") from None
    except UserError as error:
        chosen = command.commands.get(next((text for text in arguments if not text.startswith("-")), ""))
        if chosen is None:
            raise
        error.args = (spelled(str(error), spellings(chosen.params), arguments), *error.args[1:])
        raise
    return 0


# Wrong options and arguments; typer exports only the classes below this one.
_USAGE_ERROR: Any = typer.BadParameter.__base__
