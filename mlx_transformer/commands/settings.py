"""A settings object as options of a command: each field of a frozen dataclass becomes one.

Its name, type and default are the field's, its help is the string that stands under it. "unset:" in that string begins
what an option that was not given stands for.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from mlx_transformer.system.fields import meanings_of

UNSET = "; unset: "
NOT = "no_"  # begins the option that turns off what is on by default


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command for typer: those of its parameters whose type is a dataclass are given by options."""
    hints = get_type_hints(command, include_extras=True)
    given = inspect.signature(command).parameters.values()
    objects = {each.name: hints[each.name] for each in given if dataclasses.is_dataclass(hints[each.name])}

    @wraps(command)
    def typed(**values: Any) -> Any:
        for name, of in objects.items():
            fields = [field.name for field in dataclasses.fields(of)]
            values[name] = of(**{f: values.pop(f) if f in values else not values.pop(NOT + f) for f in fields})
        return command(**values)

    shown: list[inspect.Parameter] = []
    for each in given:
        if each.name in objects:
            shown += _options(objects[each.name])
        else:
            shown.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name]))
    # typer reads both.
    typed.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    typed.__annotations__ = {each.name: each.annotation for each in shown}
    return typed


def _options(of: type) -> Iterator[inspect.Parameter]:
    hints, meanings = get_type_hints(of, include_extras=True), meanings_of(of)
    for field in dataclasses.fields(of):
        name, default = field.name, field.default
        more: dict[str, Any] = {}
        help, _, unset = meanings[name].partition(UNSET)
        if unset:
            help, more = f"{help}.", {"show_default": unset.removesuffix(".")}
        if isinstance(default, tuple):
            default = []  # typer's, for an option that is given several times
        if default is True:
            name, default, help = NOT + name, False, f"Do not {help[0].lower()}{help[1:]}"
        option = typer.Option(f"--{name.replace('_', '-')}", help=help, **more)
        kind = Annotated[_bare(hints[field.name]), option]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _bare(hint: Any) -> Any:
    """The type as typer takes it: without bounds, and the first of several."""
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        return _bare(parts[0])
    if get_origin(hint) is Sequence:
        return list[parts[0]]
    if NoneType in parts:
        return _bare(parts[0]) | None
    return hint
