"""Dataclasses that are checked by their annotations, the one place where a field's type and bounds stand.

norm: Literal["layernorm", "rmsnorm"]                            one of these
gated: bool                                                      true or false
layers: Annotated[int, Bounds(at_least=0, at_most=1000)]         a whole number
dropout: Annotated[float, Bounds(at_least=0, below=1)]           a finite number; a whole one becomes a float
corpus: str | None = None                                        text; where None is the default, it may be None
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
"""The metadata of a field that few people set: a command's `--help` leaves its option to `--help-all`."""


class Bounds(NamedTuple):
    """All four hold; nothing but a finite number is within any."""

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
    """The values that one field takes. `choices`: the only values, where there are few (those of a Literal, both of a
    bool)."""

    type: type
    choices: tuple[Any, ...] = ()
    bounds: Bounds = Bounds()
    optional: bool = False

    @property
    def expectation(self) -> str:
        """In words that follow the value."""
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
        if type(value) is self.type:  # to ask whether a number is of an abstract type takes longer
            return self.bounds.hold(value)
        if isinstance(value, bool) or not isinstance(value, Real if self.type is float else Integral):
            return False
        number: Any = value  # pyright knows no conversion of the abstract types
        return self.bounds.hold(_as_float(number) if self.type is float else int(number))


@cache
def field_types(of: type) -> dict[str, FieldType]:
    """Return what each field of a dataclass takes; fields of other types than the five above are left out."""
    hints = get_type_hints(of, include_extras=True)
    kinds = {field.name: _kind(hints[field.name], field.default is None) for field in dataclasses.fields(of)}
    return {name: kind for name, kind in kinds.items() if kind is not None}


@cache
def field_docs(of: type) -> dict[str, str]:
    """Return what each field of a dataclass means: the string that stands under it, on one line; of its bases too."""
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
    """Parse a module once for all of its classes: `inspect.getsource` parses it anew for each."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def check_fields(values: Any, table: str | None = None) -> list[str]:
    """Return every field of a frozen dataclass that doesn't hold what its annotation says, each by its name and value.

    table: of a file that has the fields, which are keys of it then: `data.seed = x` in place of `seed=x`.

    A whole number where a float is meant becomes a float, in place, and NumPy's numbers become Python's.
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
    """A base of frozen dataclasses that raises `UserError` with everything that `check_fields` finds."""

    def __post_init__(self) -> None:
        if problems := check_fields(self):
            raise UserError(joined(problems))


def check_value(name: str, value: Any, hint: Any) -> None:
    """Check a value that is no field; `UserError` if it doesn't hold what such an annotation says."""
    kind = _kind(hint, optional=False)
    assert kind is not None
    if not kind.accepts(value):
        raise UserError("{} {}", Name(name, short(value)), kind.expectation)


def changed(settings: Settings, changes: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Return a settings object, a dataclass, with those changes that are fields of it, and the others."""
    before: Any = settings
    ours = {field.name for field in dataclasses.fields(before)}
    others = {name: value for name, value in changes.items() if name not in ours}
    return dataclasses.replace(before, **{n: value for n, value in changes.items() if n in ours}), others


ELSEWHERE = {"num_beams": "beam", "beam_size": "beam", "num_return_sequences": "n_best", "do_sample": "sample"}
ELSEWHERE |= {"max_length": "max_new_tokens", "max_tokens": "max_new_tokens", "min_length": "min_new_tokens"}
ELSEWHERE |= {"no_repeat_ngram_size": "no_repeat_ngram", "forced_bos_token_id": "forced_first", "lr": "learning_rate"}
"""{what others call a field: its name here}, to be named where it is asked for."""


def unknown_keys(keys: Iterable[Any], of: type, spelled: str = "unknown key {!r}") -> list[str]:
    """Return every key that is no field, with the field that others call so, or whose name is nearest."""
    known = [field.name for field in dataclasses.fields(of)]
    problems = []
    for key in keys:
        if key not in known:
            import difflib  # for none, as a rule

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
    """Infinite where a whole number is more than floats hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


class _Short(reprlib.Repr):
    """In one line of bounded length."""

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 14_000:  # Python writes no number of more than 4300 digits, later versions say so at length
            return f"a number of {x.bit_length()} bits"
        return super().repr_int(x, level)


short = _Short().repr
"""Return a value as an error can show it."""
