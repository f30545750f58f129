"""Formulas as HTML: `a_i` an index, `a^(i+1)` a power."""

from __future__ import annotations

import re
from html import escape

TAGS = {"_": "sub", "^": "sup"}
SCRIPT = re.compile(r"([_^])(?:\(((?:[^()]|\([^()]*\))*)\)|(&lt;\w|\w+))")


def as_html(formula: str) -> str:
    """Escaped, with subscripts and superscripts."""
    text = escape(formula, quote=False)
    while (replaced := SCRIPT.sub(_script, text)) != text:
        text = replaced
    return text


def _script(found: re.Match[str]) -> str:
    tag = TAGS[found[1]]
    return f"<{tag}>{found[2] or found[3]}</{tag}>"
