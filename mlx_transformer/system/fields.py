"""Check dataclass fields against their annotations, which are the only place for a field's type and bounds.

norm: Literal["layernorm", "rmsnorm"]                            one of the choices
gated: bool                                                      true or false
layers: Annotated[int, Bounds(at_least=0, at_most=1000)]         an integer within bounds
dropout: Annotated[float, Bounds(at_least=0, below=1)]           a finite number; an int becomes a float
corpus: str | None = None                                        text, or None, as its default is None
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import reprlib
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from .errors import Name, Text, UserError, joined

Settings = TypeVar("Settings")

ADVANCED = {"advanced": True}
"""Metadata of a rarely used field: its option is shown by `--help-all`, not by `--help`."""


class Bounds(NamedTuple):
    """Bounds of a number; all four must hold. Infinity and NaN are never within bounds."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def hold(self, value: float) -> bool:
        return self.at_least <= value <= self.at_most and self.above < value < self.below

    @property
    def words(self) -> str:
        limits = self._asdict().items()
        text = " and ".join(f"{name.replace('_', ' ')} {limit:,}" for name, limit in limits if math.isfinite(limit))
        return f" of {text}" if text.startswith("at") else f" {text}" if text else ""


class FieldType(NamedTuple):
    """The values of a field. choices: all of them, for a Literal or a bool; else empty."""

    type: type
    choices: tuple[Any, ...] = ()
    bounds: Bounds = Bounds()
    optional: bool = False

    @property
    def expectation(self) -> str:
        """The rest of an error after the value, e.g. "must be a whole number of at least 1"."""
        if self.type is bool:
            return "must be true or false"
        if self.choices:
            return f"is not one of {', '.join(self.choices)}"
        number = "a number" if min(self.bounds.at_most, self.bounds.below) < math.inf else "a finite number"
        return f"must be { {int: 'a whole number', float: number, str: 'text'}[self.type] }{self.bounds.words}"

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.choices or self.type is str:
            return isinstance(value, self.type) and (not self.choices or value in self.choices)
        if type(value) is self.type:  # the fast path: isinstance with an abstract type is slow
            return self.bounds.hold(value)
        if isinstance(value, bool) or not isinstance(value, Real if self.type is float else Integral):
            return False
        number: Any = value  # pyright doesn't convert Real and Integral
        return self.bounds.hold(_as_float(number) if self.type is float else int(number))


@cache
def field_types(of: type) -> dict[str, FieldType]:
    """{field: FieldType} of a dataclass, without fields whose type is none of the five above."""
    hints = get_type_hints(of, include_extras=True)
    kinds = {field.name: _kind(hints[field.name], field.default is None) for field in dataclasses.fields(of)}
    return {name: kind for name, kind in kinds.items() if kind is not None}


@cache
def field_docs(of: type) -> dict[str, str]:
    """{field: the string under it, on one line} of a dataclass and its bases."""
    meanings: dict[str, str] = {}
    for base in (*reversed(of.__mro__[1:]), of):
        if dataclasses.is_dataclass(base):
            meanings |= {
                ast.unparse(field.target): " ".join(str(ast.literal_eval(text.value)).split())
                for field, text in itertools.pairwise(_classes(base.__module__)[base.__name__].body)
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
            }
    return meanings


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Parse a module once for all its classes; `inspect.getsource` would parse it for each."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def check_fields(values: Any, table: str | None = None) -> list[str]:
    """Check all fields of a frozen dataclass; returns one message per wrong field, with its name and value.

    Converts in place: an int in a float field becomes a float, NumPy numbers become Python's. table: the table in a
    TOML file the fields were read from; messages then name `data.seed = x` instead of `seed=x`.
    """
    problems = []
    for name, kind in field_types(type(values)).items():
        value = getattr(values, name)
        if not kind.accepts(value):
            field = f"{table}.{name} = {short(value)}" if table else Name(name, short(value))
            problems.append(Text("{} {}", field, kind.expectation))
        elif type(value) is not kind.type and kind.type in (int, float) and value is not None:
            object.__setattr__(values, name, kind.type(value))
    return problems


class Checked:
    """Base of frozen dataclasses whose constructor raises `UserError` with all problems of `check_fields`."""

    def __post_init__(self) -> None:
        if problems := check_fields(self):
            raise UserError(joined(problems))


def check_value(name: str, value: Any, hint: Any) -> None:
    """Check a value that isn't a dataclass field; raises `UserError` if it doesn't fit the annotation.

    >>> check_value("port", 0, Annotated[int, Bounds(at_least=1)])
    UserError: port=0 must be a whole number of at least 1
    """
    kind = _kind(hint, optional=False)
    assert kind is not None
    if not kind.accepts(value):
        raise UserError("{} {}", Name(name, short(value)), kind.expectation)


def changed(settings: Settings, changes: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Apply the changes that are fields of a settings dataclass; returns the new settings and the other changes."""
    before: Any = settings
    ours = {field.name for field in dataclasses.fields(before)}
    others = {name: value for name, value in changes.items() if name not in ours}
    return dataclasses.replace(before, **{n: value for n, value in changes.items() if n in ours}), others


ELSEWHERE = {"num_beams": "beam", "beam_size": "beam", "num_return_sequences": "n_best", "do_sample": "sample"}
ELSEWHERE |= {"max_length": "max_new_tokens", "max_tokens": "max_new_tokens", "min_length": "min_new_tokens"}
ELSEWHERE |= {"no_repeat_ngram_size": "no_repeat_ngram", "forced_bos_token_id": "forced_first", "lr": "learning_rate"}
"""{name of a field in other libraries: its name here}, for the hint in an error."""


def unknown_keys(keys: Iterable[Any], of: type, spelled: str = "unknown key {!r}") -> list[str]:
    """One message per unknown key, with a suggestion, e.g. "unknown key 'lr' (did you mean 'learning_rate'?)"."""
    known = [field.name for field in dataclasses.fields(of)]
    problems = []
    for key in keys:
        if key not in known:
            import difflib  # rarely needed

            called = ELSEWHERE.get(str(key))
            near = [called] if called in known else difflib.get_close_matches(str(key), known, n=1)
            problems.append(spelled.format(key) + (f" (did you mean {near[0]!r}?)" if near else ""))
    return problems


def _kind(hint: Any, optional: bool) -> FieldType | None:
    if NoneType in get_args(hint):  # X | None
        hint = next(part for part in get_args(hint) if part is not NoneType)
    bounds = Bounds()
    if get_origin(hint) is Annotated:
        hint, bounds = get_args(hint)
    if get_origin(hint) is Literal:
        return FieldType(str, get_args(hint), optional=optional)
    if hint is bool:
        return FieldType(bool, (False, True), optional=optional)
    return FieldType(hint, (), bounds, optional) if hint in (int, float, str) else None


def _as_float(value: float) -> float:
    """Infinity if an int is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


class _Short(reprlib.Repr):
    """repr of bounded length, on one line."""

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 14_000:  # Python refuses to print more than 4300 digits
            return f"a number of {x.bit_length()} bits"
        return super().repr_int(x, level)


short = _Short().repr
"""A value's repr, short enough for an error message."""
