"""The command line; with `commands/` the one place that joins the MLX side and the ONNX side.

Each command imports what it needs when it runs, so `--help` is instant and the ONNX commands work without MLX.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from .commands import converting, exporting, text, training
from .spec.errors import UserError

app = typer.Typer(
    name="mlx-transformer",
    help="Train a Transformer with MLX, deploy it as ONNX, and prove that both compute the same function.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


for name, command in {
    "quickstart": training.quickstart,
    "train": training.train,
    "translate": text.translate,
    "evaluate": text.evaluate,
    "export": exporting.export,
    "validate": exporting.validate,
    "serve": text.serve,
    "import": converting.import_command,
    "to-huggingface": converting.to_huggingface_command,
    "quantize": converting.quantize,
    "info": exporting.info,
}.items():
    app.command(name)(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: every error a person can cause is one line on standard error and exit 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        with command.make_context("mlx-transformer", given or ["--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        raise SystemExit(done.exit_code) from None
    except _USAGE_ERROR as error:
        path = error.ctx.command_path if error.ctx is not None else "mlx-transformer"
        _fail(f"{' '.join(error.format_message().split())} (see {path} --help)")
    except UserError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:  # who reads our output has gone; Python must not try to write the rest of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except MemoryError as error:
        _fail(f"out of memory ({error}); try smaller batches or a smaller model", 1)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "mlx":
            raise
        _fail("MLX is not installed; ONNX folders work without it (python -m export)")


# Wrong options and arguments; typer exports only the classes below this one.
_USAGE_ERROR: Any = typer.BadParameter.__base__


def _fail(message: str, status: int = 2) -> NoReturn:
    print("mlx-transformer:", " ".join(message.splitlines()), file=sys.stderr)
    raise SystemExit(status) from None
