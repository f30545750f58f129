"""Formulas as they are typed, such as `softmax(Q K^T / √d_k) V`, read into a tree and written as MathML.

`a_i`, `a^(i+1)`: index and power. A space or `·`: product. `/`: the product before it over the factor behind it.
`[a, b; c, d]`: a matrix, row by row. `sqrt(x)` is `√x`. A name may have several letters; a few words join formulas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

TOKEN = re.compile(r"\s*(\.\.\.|->|\d+(?:,\d{3})+|\d+(?:\.\d+)?|[^\W\d_]+(?:'[a-z]+)?|\S)")
WORDS = ("and", "are", "for", "has", "is", "over", "so", "where", "with", "without")
RELATIONS = ("=", "<", ">", "≥", "≤", "→", "->", "∣", ":", ";", ",", *WORDS)
SUMS = ("+", "-")
TIMES = {"*": "·", "·": "·", "×": "×"}
CLOSED = {"(": ")", "[": "]"}
LETTERS = ("...", "∂", "∞", "½")


@dataclass(frozen=True)
class Node:
    """A part of a formula.

    `kind`: "name" and "number" (their `text`), "sign" (`text` before its only part), "script" (base, index, power),
    "root", "over" (above, below), "group" (between the two brackets of `text`), and the chains "product", "sum",
    "relation": `between` holds the operators between their parts, " " for a product without a sign.
    """

    kind: str
    text: str = ""
    parts: tuple[Node | None, ...] = ()
    between: tuple[str, ...] = ()


def read(formula: str) -> Node:
    """Raises ValueError for what isn't a formula."""
    reader = _Reader(formula)
    found = reader.relation("")
    if reader.next:
        raise ValueError(f"{formula}: {reader.next!r} is left over")
    return found


class _Reader:
    def __init__(self, formula: str) -> None:
        self.formula, self.place = formula, 0
        self.tokens = [match[1] for match in TOKEN.finditer(formula)]

    @property
    def next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1]

    def relation(self, end: str) -> Node:
        return self._chain("relation", RELATIONS, end, self._sum)

    def _sum(self, end: str) -> Node:
        if self.next not in SUMS:
            return self._chain("sum", SUMS, end, self._product)
        sign = Node("sign", self.take(), (self._product(end),))
        return self._chain("sum", SUMS, end, self._product, sign)

    def _chain(
        self, kind: str, operators: Sequence[str], end: str, part: Callable[[str], Node], first: Node | None = None
    ) -> Node:
        parts: list[Node | None] = [first or self._part(operators, end, part)]
        between = []
        while self.next in operators:
            between.append(self.take())
            parts.append(self._part(operators, end, part))
        only = parts[0] if len(parts) == 1 else None
        return only or Node(kind, "", tuple(parts), tuple(between))

    def _part(self, operators: Sequence[str], end: str, part: Callable[[str], Node]) -> Node | None:
        return None if self.next in (*operators, end, "") and operators is RELATIONS else part(end)

    def _product(self, end: str) -> Node:
        factors, between = [self._factor()], []
        while self.next not in (*RELATIONS, *SUMS, end, ""):
            if self.next == "/":
                self.take()
                above = Node("product", "", tuple(factors), tuple(between)) if between else factors[0]
                factors, between = [Node("over", "", (above, self._factor()))], []
            else:
                between.append(TIMES[self.take()] if self.next in TIMES else " ")
                factors.append(self._factor())
        return Node("product", "", tuple(factors), tuple(between)) if between else factors[0]

    def _factor(self) -> Node:
        base, scripts = self._plain(), dict[str, Node]()
        while self.next in ("_", "^"):
            kind, sign = self.take(), self.take() if self.next == "-" else ""
            script = _bare(self._plain())
            scripts[kind] = Node("sign", sign, (script,)) if sign else script
        return Node("script", "", (base, scripts.get("_"), scripts.get("^"))) if scripts else base

    def _plain(self) -> Node:
        token = self.take() if self.next else ""
        if token == "√" or (token == "sqrt" and self.next == "("):
            return Node("root", "", (_bare(self._factor()),))
        if token in (*CLOSED, "|"):
            end = CLOSED.get(token, token)
            inside = self._sum(end) if token == "|" else self.relation(end)
            if self.next != end:
                raise ValueError(f"{self.formula}: a {token} isn't closed")
            self.take()
            return Node("group", token + end, (inside,))
        if token[:1].isdigit():
            return Node("number", token)
        if token[:1].isalpha() or token in LETTERS:
            return Node("name", token)
        raise ValueError(f"{self.formula}: {token or 'nothing'} stands where a value should")


def _bare(node: Node) -> Node:
    """Without round brackets: roots, fractions, indices and powers show by themselves how far they reach."""
    inside = node.parts[0] if node.kind == "group" and node.text == "()" else None
    return inside or node


def as_html(formula: str) -> str:
    """Within a sentence: escaped, with subscripts and superscripts."""
    text = escape(formula, quote=False)
    while (replaced := SCRIPT.sub(_script, text)) != text:
        text = replaced
    return text


TAGS = {"_": "sub", "^": "sup"}
SCRIPT = re.compile(r"([_^])(?:\(((?:[^()]|\([^()]*\))*)\)|(&lt;\w|\w+))")


def _script(found: re.Match[str]) -> str:
    tag = TAGS[found[1]]
    return f"<{tag}>{found[2] or found[3]}</{tag}>"


def as_mathml(formula: str) -> str:
    """On a line of its own; what has no sign of a formula is a sentence, and is escaped."""
    if not re.search(r"[=_^√·/+()]", formula):
        return escape(formula, quote=False)
    return f'<math display="block"><mrow>{_written(read(formula))}</mrow></math>'


def _written(node: Node | None) -> str:
    if node is None:
        return ""
    parts = [_written(part) for part in node.parts]
    match node.kind:
        case "name":
            return f"<mi>{node.text}</mi>"
        case "number":
            return f"<mn>{node.text}</mn>"
        case "sign":
            return _operator(node.text) + parts[0]
        case "root":
            return f"<msqrt>{parts[0]}</msqrt>"
        case "over":
            return f"<mfrac>{''.join(f'<mrow>{_written(_bare(part))}</mrow>' for part in node.parts if part)}</mfrac>"
        case "script":
            tag = "msubsup" if all(parts) else "msub" if parts[1] else "msup"
            return f"<{tag}>{''.join(f'<mrow>{part}</mrow>' for part in parts if part)}</{tag}>"
        case "group":
            return f"<mrow><mo>{node.text[0]}</mo>{_matrix(node.parts[0]) or parts[0]}<mo>{node.text[1]}</mo></mrow>"
        case "product":
            signs = [_gap(*node.parts[i : i + 2]) if s == " " else _operator(s) for i, s in enumerate(node.between)]
        case _:
            signs = [_operator(sign) for sign in node.between]
    return parts[0] + "".join(sign + part for sign, part in zip(signs, parts[1:], strict=True))


def _operator(sign: str) -> str:
    if sign in WORDS:
        return f"<mtext>&nbsp;{sign}&nbsp;</mtext>"
    return f"<mo>{escape({'-': '−', '->': '→'}.get(sign, sign))}</mo>"


def _gap(left: Node | None, right: Node | None) -> str:
    """Between two factors: nothing before the brackets of a function, more beside a word than beside a letter."""
    ends = [part for part in (_base(left), _base(right)) if part and part.kind == "name"]
    if right and right.text == "()" and ends and ends[0] is _base(left):
        return "<mo>&#x2061;</mo>"
    return f'<mspace width="{0.35 if any(len(end.text) > 1 for end in ends) else 0.15}em"/>'


def _base(node: Node | None) -> Node | None:
    return node.parts[0] if node and node.kind == "script" else node


def _matrix(inside: Node | None) -> str:
    if inside is None or ";" not in inside.between:
        return ""
    rows = [[inside.parts[0]]]
    for sign, part in zip(inside.between, inside.parts[1:], strict=True):
        rows.append([part]) if sign == ";" else rows[-1].append(part)
    cells = ("".join(f"<mtd>{_written(cell)}</mtd>" for cell in row) for row in rows)
    return f"<mtable>{''.join(f'<mtr>{row}</mtr>' for row in cells)}</mtable>"
