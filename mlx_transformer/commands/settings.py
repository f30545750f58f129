"""Turn settings dataclasses into options: each field of a frozen dataclass becomes an option.

The option takes its name, type, choices and default from the field, and its help from the string under the field. In
this string, "unset:" begins the meaning of a default None. Field metadata changes the rest: {"option": ("--with",)} is
another name, `ADVANCED` shows the option only in `--help-all`, "check" goes to `Option`.
Arguments and settings that several commands share are here, too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import click

from export.settings import PrecisionName
from mlx_transformer.core.folders import check_there
from mlx_transformer.decoding.options import Options
from mlx_transformer.generation.text_options import Overlong
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.fields import ADVANCED, FieldType, field_docs, field_types
from mlx_transformer.system.files import check_text

from .parameters import Argument, Option, check_values

UNSET = re.compile(r"[;.] [Uu]nset: ")
SENTENCE_END = re.compile(r"(?<!e\.g)(?<!et al)\.\s")
NOT = "no_"  # prefix of options that turn off a default
OUT, OUT_OPTION = "out", "out_option"
UNTYPED = (None, click.core.ParameterSource.DEFAULT)
"""Click's sources of a value that was not typed on the command line."""

Model = Annotated[
    Path,
    Argument(help="A checkpoint, a run's folder, an ONNX folder, or a file from `export --search`.", check=check_there),
]
Folder = Annotated[
    Path,
    Argument(
        help="A checkpoint, a run's folder, an ONNX folder, or a published model: a folder, a name on the Hub, or a "
        "GGUF file.",
        check=check_there,
    ),
]
Embedding = Annotated[
    Path,
    Argument(
        help="A checkpoint, a run's folder, an ONNX folder, or a file from `export --embed-tokenizer`.",
        check=check_there,
    ),
]
Checkpoint = Annotated[Path, Argument(help="A checkpoint folder, or the folder of a training run.", check=check_there)]
Onnx = Annotated[Path, Argument(help="Folder written by `export`.", check=check_there)]
Source = Annotated[Path, Option(help="Source sentences, one a line.", check=check_text)]
Reference = Annotated[Path, Option(help="Reference translations of the source, line by line.", check=check_text)]
Force = Annotated[bool, Option("--force", help="Replace another model in OUT.")]
Replace = Annotated[bool, Option("--force", help="Replace an earlier file of this command.")]
OverlongOption = Annotated[Overlong, Option(help="What to do with a line of more tokens than the model takes.")]

Texts = Annotated[
    list[str] | None, Argument(help="Text to use in place of --input; each argument is a line.", show_default=False)
]


@dataclass(frozen=True)
class OutArgument:
    """Marks a parameter `out` that is the argument OUT, or the option -o as in every other command."""

    help: str

    def options(self) -> Iterator[inspect.Parameter]:
        kind, path = inspect.Parameter.KEYWORD_ONLY, Path | None
        argument = Argument(help=self.help, show_default=False)
        option = Option("--out", "-o", help="OUT, if not given as an argument.", show_default=False)
        yield inspect.Parameter(OUT, kind, default=None, annotation=Annotated[path, argument])
        yield inspect.Parameter(OUT_OPTION, kind, default=None, annotation=Annotated[path, option])

    def of(self, values: dict[str, Any]) -> Path:
        argument, option = values.pop(OUT), values.pop(OUT_OPTION)
        if argument is not None and option is not None:
            raise UserError(f"OUT is given twice: {argument}, and --out {option}")
        if argument is None and option is None:
            raise UserError("Missing argument 'OUT', or option '--out'")
        return argument or option  # type: ignore[return-value]


@dataclass(frozen=True)
class Shown:
    """Marks a settings object: shows its options in their own panel, or only some of its fields."""

    panel: str | None = None
    fields: str = ""


@dataclass(frozen=True, kw_only=True)
class LineFiles:
    """Files of a command that writes JSON for each line of text."""

    input: Path | None = field(default=None, metadata={"option": ("--input", "-i"), "check": check_text})
    """Text file, one text a line; unset: stdin."""
    out: Path | None = field(default=None, metadata={"option": ("--out", "-o")})
    """File of JSON lines to write; it appears whole or not at all; unset: stdout."""
    resume: bool = False
    """Continue an interrupted run into the same OUT; input, options and model must be the same."""
    force: bool = False
    """Replace an earlier file of this command."""


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Which runtime runs the model, and how."""

    runtime: Literal["mlx", "onnx"] | None = None
    """Runtime to use; unset: mlx for a checkpoint, onnx for an ONNX model."""
    threads: int | None = field(default=None, metadata=ADVANCED)
    """ONNX Runtime's threads per operator; unset: one per core."""
    precision: PrecisionName | None = None
    """ONNX folder: the precision to open (unset: float32, or the only one). Checkpoint: compute in float32, float16 or
    bfloat16 (unset: as stored)."""
    verify: bool = field(default=True, metadata=ADVANCED)
    """Check the model's files against the SHA-256 digests in their manifest."""


@dataclass(frozen=True, kw_only=True)
class TranslatingSettings(RuntimeSettings):
    """Which runtime runs a model that translates, and how."""

    shortlist: Path | str | None = field(default=None, metadata=ADVANCED)
    """Shortlist in Marian's format: restricts a translation to likely target tokens of its source tokens; none: all
    tokens; unset: as the model's settings say."""


@dataclass(frozen=True, kw_only=True)
class ContinuingSettings(RuntimeSettings):
    """Which runtime runs a decoder, and how."""

    cache_bits: Literal[4, 8] | None = field(default=None, metadata=ADVANCED)
    """Quantise cached keys and values to this number of bits, for long texts in little memory; checkpoints only; unset:
    don't."""
    draft: Path | None = field(default=None, metadata=ADVANCED)
    """Smaller model with the same vocabulary, which guesses the tokens of --speculate; unset: guesses come from the
    text so far."""


@dataclass(frozen=True, kw_only=True)
class TypedOptions(Options):
    """Search options, and which of them were typed on the command line; the others are as the model has them."""

    typed_in: frozenset[str] = frozenset()


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command for the command line: a parameter whose type is a settings object becomes options.

    A settings object is a dataclass, or has `options()`, its parameters, and `of(values)`, which takes their values out
    of all values. The new signature has every option with its `Option` or `Argument`.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    made: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for each in inspect.signature(command).parameters.values():
        hint, *marks = get_args(hints[each.name]) if get_origin(hints[each.name]) is Annotated else [hints[each.name]]
        maker = next((one for one in (hint, *marks) if hasattr(one, "options")), None)
        if maker is not None:
            parameters += maker.options()
            made[each.name] = maker.of
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            options = _options(hint, next((mark for mark in marks if isinstance(mark, Shown)), Shown()))
            parameters += [option for option, _ in options.values()]
            made[each.name] = partial(_object, hint, options)
        else:
            parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name]))

    @wraps(command)
    def typed(**values: Any) -> Any:
        context = click.get_current_context(silent=True)
        typed_in = {name for name in values if context and context.get_parameter_source(name) not in UNTYPED}
        given = dict(values)
        objects = {name: make(values) for name, make in made.items()}
        for name, each in objects.items():
            if isinstance(each, Options):
                objects[name] = TypedOptions(**vars(each), typed_in=frozenset(typed_in))
        check_values(parameters, given)
        return command(**values, **objects)

    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return typed


def chosen(search: Options, names: str) -> dict[str, Any]:
    """Return the options of these names that were typed, as keyword arguments; the others are as the model has them."""
    typed_in = search.typed_in if isinstance(search, TypedOptions) else names.split()
    return {name: getattr(search, name) for name in names.split() if name in typed_in}


def _split_help(meaning: str) -> tuple[str, str | None]:
    """Split a field's help into its meaning and the words after "unset:", e.g. ("Runtime.", "mlx for a checkpoint")."""
    if (unset := UNSET.search(meaning)) is None:
        return meaning, None
    return f"{meaning[: unset.start()]}.", meaning[unset.end() :].removesuffix(".")


_Option = tuple[inspect.Parameter, Callable[[Any], Any]]
"""An option's parameter, and a function from its value to the field's value."""


def _object(of: type, options: Mapping[str, _Option], values: dict[str, Any]) -> Any:
    """Make the settings object; takes its options' values out of `values`."""
    return of(**{name: value_of(values.pop(option.name)) for name, (option, value_of) in options.items()})


def _options(of: type, mark: Shown) -> dict[str, _Option]:
    """Return {field: option} of a settings object."""
    hints, meanings = get_type_hints(of, include_extras=True), field_docs(of)
    chosen = mark.fields.split() or [field.name for field in dataclasses.fields(of)]
    return {
        field.name: _option(field, _bare(hints[field.name]), meanings[field.name], mark.panel)
        for field in dataclasses.fields(of)
        if field.name in chosen
    }


def _option(field: dataclasses.Field, hint: Any, meaning: str, panel: str | None) -> _Option:
    help, unset = _split_help(meaning)
    default: Any = field.default
    name, value_of = field.name, lambda value: value
    if get_origin(hint) is list:
        usual, unset, default = default, ", ".join(default) or None, ()
        value_of = lambda values: list(values) if values else usual  # noqa: E731
    elif default is True:
        name, default, help = NOT + name, False, f"Do not {help[0].lower()}{help[1:]}"
        value_of = lambda values: not values  # noqa: E731
    more: dict[str, Any] = {} if unset is None else {"show_default": unset}
    spelled = field.metadata.get("option", (f"--{name.replace('_', '-')}",))
    shown, check = "--help-all" if field.metadata.get("advanced") else "--help", field.metadata.get("check")
    option = Option(*spelled, help=help, panel=panel, shown=shown, check=check, **more)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, option]), value_of


def _bare(hint: Any) -> Any:
    """Return the type as the command line reads it: without bounds, and the first type of a union."""
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        return _bare(parts[0])
    if get_origin(hint) is Sequence:
        return list[parts[0]]
    if NoneType in parts:
        return _bare(parts[0]) | None
    return _bare(parts[0]) if get_origin(hint) in (UnionType, Union) else hint


@dataclass(frozen=True)
class Key:
    """A key of a recipe."""

    table: str
    name: str
    kind: FieldType
    help: str
    unset: str | None
    """Its value if no recipe sets it, in words."""


class RecipeKeys:
    """The keys of a recipe as options of `train`, made from the classes that check recipes, and the values that were
    typed."""

    PANELS: ClassVar = {
        "Data": (
            "corpus source target pairs valid_source valid_target text labelled vocab_size",
            "languages valid_pairs valid_text valid_labelled separate_vocabularies batch_tokens",
        ),
        "Model": ("objective preset start_from dropout", "norm_placement freeze"),
        "Length": ("steps epochs minutes", ""),
        "Optimizer": ("learning_rate warmup_steps", "schedule optimizer accumulate precision memory"),
        "Adapter": ("adapter", "adapter_rank adapter_alpha adapter_targets adapter_dropout"),
        "Vectors": ("", "batch_pairs temperature symmetric chunk source_prompt target_prompt pooling teacher"),
        "Run": ("seed", "best patience final checkpoint_seconds"),
    }
    """{panel: (keys in `--help`, keys added by `--help-all`)}; `--help-recipe` has all."""
    RENAMED: ClassVar = {"warmup_steps": "--warmup", "start_from": "--from", "checkpoint_seconds": "--save-every"}

    def __init__(self, tables: dict[str, dict[str, Any]]):
        self.tables = tables

    @classmethod
    def of(cls, values: dict[str, Any]) -> RecipeKeys:
        """Take the values of the recipe's keys out of `values`; a key that wasn't typed is None."""
        tables: dict[str, dict[str, Any]] = {"data": {}, "model": {}, "training": {}}
        for key in cls.declared():
            value = values.pop(key.name)
            if key.kind.type is bool:
                value = False if values.pop(NOT + key.name) else value or None
            tables[key.table][key.name] = value
        return cls(tables)

    @classmethod
    def options(cls) -> list[inspect.Parameter]:
        """Return the options in the order of the panels; keys in no panel are hidden."""
        panels = {name: panel for panel, names in cls.PANELS.items() for name in " ".join(names).split()}
        places = {name: place for place, name in enumerate(panels)}
        keys = sorted(cls.declared(), key=lambda key: places.get(key.name, len(places)))
        return [option for key in keys for option in cls._options(key, panels.get(key.name))]

    def check_files(self) -> None:
        """Raise `UserError` for a file that doesn't exist."""
        from mlx_transformer.training.options import FILES, is_there

        for name in FILES:
            if (path := self.tables["data"].get(name)) is not None and not is_there(path):
                raise UserError(f"--{name.replace('_', '-')} {path}: cannot be read (no such file)")

    @classmethod
    def advanced(cls) -> list[str]:
        return [name for _, names in cls.PANELS.values() for name in names.split()]

    @staticmethod
    @cache
    def declared() -> tuple[Key, ...]:
        from mlx_transformer.core.config import PRESETS
        from mlx_transformer.training import options

        stated = {"norm_placement": options.NORM_PLACEMENT, **dict.fromkeys(PRESETS["small"], "the preset's")}
        keys = []
        for table, name, of in options.recipe_keys():
            if (kind := field_types(of).get(name)) is None:
                continue  # a table, e.g. [model.head], is no option
            default = stated.get(name, getattr(of, name, None))
            help, unset = _split_help(field_docs(of)[name])
            if unset is None and default not in (None, "", False):
                unset = f"{default:g}" if isinstance(default, float) else str(default).lower()
            keys.append(Key(table, name, kind, f"{SENTENCE_END.split(help)[0].removesuffix('.')}.", unset))
        return tuple(keys)

    @classmethod
    def _options(cls, key: Key, panel: str | None) -> Iterator[inspect.Parameter]:
        hint: Any = Literal[key.kind.choices] if key.kind.type is str and key.kind.choices else key.kind.type
        more: dict[str, Any] = {} if key.unset is None else {"show_default": key.unset}
        if key.name == "memory":
            more["type"] = _Gigabytes()
        spelled = cls.RENAMED.get(key.name, f"--{key.name.replace('_', '-')}")
        shown = "nowhere" if panel is None else "--help-all" if key.name in cls.advanced() else "--help"
        option = Option(spelled, help=key.help, panel=panel, shown=shown, **more)
        kind = inspect.Parameter.KEYWORD_ONLY
        if key.kind.type is not bool:
            yield inspect.Parameter(key.name, kind, default=None, annotation=Annotated[hint | None, option])
            return
        off = Option(f"--no-{spelled.removeprefix('--')}", shown="nowhere", help=f"{key.name} = false.")
        yield inspect.Parameter(key.name, kind, default=False, annotation=Annotated[bool, option])
        yield inspect.Parameter(NOT + key.name, kind, default=False, annotation=Annotated[bool, off])


class _Gigabytes(click.ParamType):
    name = "GB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(str(value).strip().upper().removesuffix("GB"))
        except ValueError:
            self.fail(f"{value}: give gigabytes, such as 16GB", param, ctx)
