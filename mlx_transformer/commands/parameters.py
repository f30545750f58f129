"""Turn a function's annotations into click parameters and help.

out: Annotated[Path | None, Option("--out", "-o", help="File to write.")] = None
model: Annotated[Path, Argument(help="Checkpoint folder.")]

The annotation's type decides how the value is read: bool is a flag, a Literal is a choice, a list may be given several
times.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click

HELP_ALL = "mlx_transformer.help_all"
"""Key in a click context's `meta`, set if `--help-all` was given."""
NAMES_WIDTH = 26
"""Columns of option names in help; after a longer name the text begins on the next line."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
TYPES: dict[Any, click.ParamType] = {
    str: click.STRING,
    int: click.INT,
    float: click.FLOAT,
    bool: click.BOOL,
    Path: click.Path(path_type=Path),
}


class Option:
    """Marks a parameter as an option, e.g. `Option("--out", "-o", help=...)`. Without names it is named like the
    parameter."""

    def __init__(
        self,
        *names: str,
        help: str,
        show_default: bool | str = True,
        panel: str | None = None,
        shown: Literal["--help", "--help-all", "nowhere"] = "--help",
        type: click.ParamType | None = None,
        prints: Callable[[click.Context], None] | None = None,
        check: Callable[[Any], None] | None = None,
    ):
        """show_default: the default in words. panel: its heading in help. shown: which help lists it. type: a click
        type, if the annotation's is too general. prints: makes a flag that prints something and ends the command.
        check: raises `UserError` for a wrong value before the command starts and imports anything slow."""
        self.names, self.help, self.show_default, self.panel = names, help, show_default, panel
        self.shown, self.type, self.prints, self.check = shown, type, prints, check


class Argument:
    """Marks a parameter as a positional argument."""

    def __init__(
        self,
        *,
        help: str,
        show_default: bool | str = True,
        metavar: str | None = None,
        check: Callable[[Any], None] | None = None,
    ):
        """check: as in `Option`."""
        self.help, self.show_default, self.metavar, self.check = help, show_default, metavar, check


def mark_of(parameter: inspect.Parameter) -> Option | Argument:
    """Return the `Option` or `Argument` in a parameter's annotation."""
    return next(mark for mark in get_args(parameter.annotation)[1:] if isinstance(mark, Option | Argument))


def check_values(parameters: Iterable[inspect.Parameter], values: Mapping[str, Any]) -> None:
    """Run the parameters' `check` on their values; raises `UserError` for the first wrong value."""
    for each in parameters:
        if (check := mark_of(each).check) is not None and (value := values.get(each.name)) is not None:
            for one in value if isinstance(value, tuple | list) else (value,):
                check(one)


def click_parameter(parameter: inspect.Parameter) -> click.Parameter:
    """Make a click parameter from a parameter annotated with Annotated[type, Option or Argument]."""
    hint, mark = get_args(parameter.annotation)[0], mark_of(parameter)
    required = parameter.default is inspect.Parameter.empty
    kind, several = _type(hint)
    facts: dict[str, Any] = {"type": kind, "required": required}
    if not required:
        facts["default"] = parameter.default
    if isinstance(mark, Argument):
        return _Argument([parameter.name], mark, nargs=-1 if several else 1, metavar=mark.metavar, **facts)
    spelled = parameter.name.replace("_", "-")
    names = mark.names or (f"--{spelled}/--no-{spelled}" if parameter.default is True else f"--{spelled}",)
    if mark.type is not None:
        facts["type"] = mark.type
    if mark.prints is not None:
        facts |= {"is_eager": True, "expose_value": False, "callback": _printing(mark.prints)}
    if kind is click.BOOL:
        facts |= {"is_flag": True, "type": None}
    says_nothing = mark.show_default is True and parameter.default in (None, "", (), False)
    shown = False if says_nothing else mark.show_default
    return _Option([parameter.name, *names], mark, multiple=several, show_default=shown, help=mark.help, **facts)


def _type(hint: Any) -> tuple[click.ParamType, bool]:
    """Return click's type, and whether the value may be given several times."""
    parts = [part for part in get_args(hint) if part is not NoneType]
    origin = get_origin(hint)
    if origin in (UnionType, Union):
        return _type(parts[0])
    if origin is list:
        return _type(parts[0])[0], True
    if origin is Literal:
        return click.Choice(parts), False
    return TYPES.get(hint, click.STRING), False


def _printing(prints: Callable[[click.Context], None]) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not context.resilient_parsing:
            prints(context)
            context.exit()

    return callback


class _Option(click.Option):
    def __init__(self, names: Sequence[str], mark: Option, **facts: Any):
        super().__init__(names, hidden=mark.shown == "nowhere", **facts)
        self.panel, self.advanced = mark.panel, mark.shown == "--help-all"


class _Argument(click.Argument):
    """A click argument with help, which click's own lacks."""

    panel, advanced = "Arguments", False

    def __init__(self, names: Sequence[str], mark: Argument, **facts: Any):
        super().__init__(names, **facts)
        self.help, self._show_default = mark.help, mark.show_default

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        shown = self._show_default if isinstance(self._show_default, str) else self.default
        default = f"  [default: {shown}]" if self._show_default and isinstance(shown, str | Path) else ""
        return self.human_readable_name, f"{self.help}{default}"


class Command(click.Command):
    """A command that also accepts other spellings of its options, and its first argument as `--model`.

    `--help` shows the common options; if there are more, `--help-all` shows all.
    """

    spellings: Mapping[str, str] = {}
    """{other spelling, not shown in help: option}."""

    def __init__(self, name: str, run: Callable[..., Any]):
        params = [click_parameter(each) for each in inspect.signature(run).parameters.values()]
        if any(getattr(each, "advanced", False) for each in params):
            annotation = Annotated[bool, Option("--help-all", help="Show all options and exit.", prints=_print_all)]
            kind = inspect.Parameter.KEYWORD_ONLY
            params.append(click_parameter(inspect.Parameter("help_all", kind, default=False, annotation=annotation)))
        super().__init__(name, callback=run, params=params, help=inspect.getdoc(run), context_settings=CONTEXT)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        takes_model = "--model" not in options and bool(self.params) and self.params[0].name == "model"
        end = args.index("--") if "--" in args else len(args)
        read: list[str] = []
        for part in args[:end]:
            name, sign, value = part.partition("=")
            if takes_model and sign and name == "--model":
                read += [name, value]
            else:
                read.append(_spelled(name, options, self.spellings) + sign + value)
        if takes_model and "--model" in read[:-1]:
            at = read.index("--model")
            read = [read[at + 1], *read[:at], *read[at + 2 :]]
        return super().parse_args(ctx, [*read, *args[end:]])

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Do nothing: later versions of click print arguments here, but `format_options` already does."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        left_out = 0
        for each in self.get_params(ctx):
            if getattr(each, "advanced", False) and HELP_ALL not in ctx.meta:
                left_out += 1
            elif (record := each.get_help_record(ctx)) is not None:
                panels.setdefault(getattr(each, "panel", None) or "Options", []).append(record)
        write_panels(formatter, panels)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{left_out} more options: {ctx.command_path} --help-all")


def _spelled(name: str, options: Container[str], known: Mapping[str, str]) -> str:
    """Return the option's name here: from `known` spellings, or with `-` for `_` as Python programs write it."""
    if name.startswith("--") and name not in options and "_" in name:
        name = name.replace("_", "-")
    return known.get(name, name)


def _print_all(ctx: click.Context) -> None:
    ctx.meta[HELP_ALL] = True
    click.echo(ctx.get_help(), color=ctx.color)


class Program(click.Group):
    """A command line that lists its commands with one line each, without importing them."""

    def __init__(
        self, name: str, panels: Mapping[str, Mapping[str, str]], commands: Mapping[str, Command], **facts: Any
    ):
        """panels: {heading: {command: its line}}."""
        super().__init__(name, context_settings=CONTEXT, **facts)
        self.panels, self.commands = panels, commands  # type: ignore[assignment]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [each.get_help_record(ctx) for each in self.get_params(ctx)]
        rows = {"Options": [record for record in options if record is not None]}
        write_panels(formatter, rows | {panel: list(lines.items()) for panel, lines in self.panels.items()})


def write_panels(formatter: click.HelpFormatter, panels: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Write tables of names and their meanings under headings."""
    for name, rows in panels.items():
        if rows:
            with formatter.section(click.style(name, bold=True)):
                formatter.write_dl(rows, col_max=NAMES_WIDTH)
