"""Formulas of the claims and the guide, evaluated: both sides of every equation whose names are given values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from claims.formula import WORDS, Node, read

Values = Mapping[str, Any]
"""{name: number, array, or function}. `a_i` is looked up as "a_i", then as a[i]; `W^Q` as "W^Q"."""
ENDS = (",", ";", ":", "→", "->", *WORDS)
FUNCTIONS = {name: getattr(np, name) for name in ("sin", "cos", "exp", "log", "tanh", "diag")}
FUNCTIONS |= {"max": np.maximum, "min": np.minimum, "½": 0.5}

IN_WORDS = {12, 13, 18, 24, 26, 28, 29, 30, 31, 34, 35, 38, 45, 46, 48, 49, 53, 54, 55, 56}
"""Rows whose formula is a sentence, or a limit or derivative that a value can't show: their numbers are compared."""


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def evaluated(formula: str, values: Values, tolerance: float = 1e-9) -> int:
    """Assert that every equation and inequality with known names holds; return how many were compared.

    An equation for a name without a value defines it: `w_j = 10000^(-2j/d)`.
    """
    known, compared = {**FUNCTIONS, "softmax": softmax, **values}, 0
    statements = _statements(read(formula))
    defined = [parts for parts, signs in statements if signs == ["="] and not _can(parts[0], known)]
    known |= {_text(name): meaning for name, meaning in defined}
    for parts, signs in statements:
        if not signs or parts in defined or not all(_can(part, known) for part in parts):
            continue
        found = [value(part, known) for part in parts]
        for sign, left, right in zip(signs, found, found[1:], strict=False):
            where = f"{formula}: {left} {sign} {right}"
            assert np.all(left >= right) if sign == "≥" else _equal(left, right, tolerance), where
            compared += 1
    return compared


def _equal(left: Any, right: Any, tolerance: float) -> bool:
    left, right = np.asarray(left, float), np.asarray(right, float)
    return left.shape == right.shape and bool(np.abs(left - right).max() <= tolerance * max(1, np.abs(right).max()))


def _statements(node: Node) -> list[tuple[list[Node], list[str]]]:
    """Split at commas and words: [(parts, the signs between them)]."""
    if node.kind != "relation":
        return [([node], [])]
    found: list[tuple[list[Node], list[str]]] = [([], [])]
    for sign, part in zip((",", *node.between), node.parts, strict=True):
        if sign in ENDS:
            found.append(([], []))
        else:
            found[-1][1].append(sign)
        found[-1][0].extend([part] if part else [])
    return [each for each in found if each[0]]


def _can(node: Node, values: Values) -> bool:
    try:
        value(node, values)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return True


def value(node: Node | None, values: Values) -> Any:
    assert node is not None
    match node.kind:
        case "number":
            return float(node.text.replace(",", ""))
        case "name":
            return _known(node.text, values)
        case "sign":
            return -value(node.parts[0], values) if node.text == "-" else value(node.parts[0], values)
        case "root":
            return np.sqrt(value(node.parts[0], values))
        case "over":
            above, below = (value(part, values) for part in node.parts)
            return above / below
        case "sum":
            first, *others = (value(part, values) for part in node.parts)
            for sign, other in zip(node.between, others, strict=True):
                first = first + other if sign == "+" else first - other
            return first
        case "product":
            return _product(list(node.parts), list(node.between), values)
        case "script":
            return _script(node, values)
        case "group":
            return _group(node, values)
    raise ValueError(node)


def _known(name: str, values: Values) -> Any:
    found = values[name]
    return value(found, values) if isinstance(found, Node) else found


def _script(node: Node, values: Values) -> Any:
    base, index, power = node.parts
    assert base is not None
    name = _text(base)
    if power and power.kind == "name" and f"{name}^{power.text}" in values:
        name, power = f"{name}^{power.text}", None
    if index is None:
        found = value(base, values) if base.kind != "name" else _known(name, values)
    elif f"{name}_{_text(index)}" in values:
        found = _known(f"{name}_{_text(index)}", values)
    else:
        found = values[name][round(value(index, values))]
    if power is None:
        return found
    return np.swapaxes(found, -1, -2) if power.kind == "name" and power.text == "T" else found ** value(power, values)


def _group(node: Node, values: Values) -> Any:
    inside = node.parts[0]
    assert inside is not None
    if node.text == "||":
        return np.linalg.norm(value(inside, values))
    if inside.kind != "relation":
        return value(inside, values)
    rows: list[list[Any]] = [[]]
    for sign, part in zip((",", *inside.between), inside.parts, strict=True):
        if sign == ";":
            rows.append([])
        elif sign == "=":
            rows[-1].pop()  # Q = x W: the value of an argument
        rows[-1].append(value(part, values))
    return np.array(rows) if len(rows) > 1 else np.hstack(rows[0])


def _product(parts: list[Any], between: list[str], values: Values) -> Any:
    first = parts.pop(0)
    if first.kind == "script" and _text(first.parts[0]) == "Σ":
        rest = replace(read("1 1"), parts=tuple(parts), between=tuple(between[1:])) if len(parts) > 1 else parts[0]
        index = _text(first.parts[1])
        return sum(value(rest, {**values, index: float(i)}) for i in range(values[f"#{index}"]))
    found = value(first, values)
    while parts:
        sign, part = between.pop(0), parts.pop(0)
        if callable(found):
            power = part.parts[2] if part.kind == "script" and part.parts[0].kind == "group" else None
            found = found(*_arguments(part.parts[0] if power else part, values))
            found = found.T if power else found  # f(x)^T
            continue
        other = _product([part, *parts], between, values) if _opens(part, values) else value(part, values)
        found = found @ other if np.ndim(found) and np.ndim(other) and sign in (" ", "·") else found * other
        if _opens(part, values):
            break
    return found


def _opens(part: Node, values: Values) -> bool:
    """Whether it is a function or a sum, so that what follows belongs to it."""
    return _text(part.parts[0] if part.kind == "script" else part) == "Σ" or callable(values.get(_text(part)))


def _arguments(node: Node, values: Values) -> list[Any]:
    inside = node.parts[0] if node.kind == "group" and node.text == "()" else node
    assert inside is not None
    if inside.kind != "relation":
        return [value(inside, values)]
    parts = list[Node]()
    for sign, part in zip((",", *inside.between), inside.parts, strict=True):
        assert part is not None
        if sign == "=":
            parts.pop()
        parts.append(part)
    return [found for i in range(len(parts)) for found in _expanded(parts, i, values)]


def _expanded(parts: list[Node], i: int, values: Values) -> list[Any]:
    """`head_1, ..., head_H`: the ones between."""
    if parts[i].text != "...":
        return [value(parts[i], values)]
    (base, first, _), (_, last, _) = parts[i - 1].parts, parts[i + 1].parts
    between = range(round(value(first, values)) + 1, round(value(last, values)))
    return [value(Node("script", "", (base, Node("number", str(n)), None)), values) for n in between]


def _text(node: Node | None) -> str:
    """A node as a name: `w_j`, `t`, `t-1`."""
    if node is None:
        return ""
    if node.kind == "script":
        base, index, power = map(_text, node.parts)
        return base + (f"^{power}" if power else "") + (f"_{index}" if index else "")
    return node.text or "".join(map(_text, node.parts))
