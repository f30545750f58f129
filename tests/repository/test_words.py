"""The one rule of style that a test can hold: no sentence of a docstring or a comment begins with "Of"."""

import ast
import io
import re
import tokenize

import pytest
from imports import modules

SENTENCE = re.compile(r"(?:^|[.:;?!)]\s+|\n\s*\n\s*)Of\s+(?!course\b)")


def words_of(source: str) -> list[tuple[int, str]]:
    """(line, text) of every docstring, documented field and comment; a comment of several lines is one text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.append((node.lineno, node.value.value.strip()))
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text, line = token.string.lstrip("# ").strip(), token.start[0]
            if line == last + 1 and found and token.line.lstrip().startswith("#"):
                found[-1] = (found[-1][0], f"{found[-1][1]} {text}")
            else:
                found.append((line, text))
            last = line
    return found


@pytest.mark.parametrize("text", ["Of one head.", "Shapes. Of `rows`: theirs.", "Gives it.\n\n    Of what is left."])
def test_a_sentence_that_begins_with_of_is_seen(text: str) -> None:
    assert SENTENCE.search(text)


@pytest.mark.parametrize("text", ["The mean of one head.", "Offsets.", "Of course it is."])
def test_other_words_are_not(text: str) -> None:
    assert not SENTENCE.search(text)


def test_no_sentence_begins_with_of() -> None:
    found = []
    for module, path in sorted(modules().items()):
        words = words_of(path.read_text(encoding="utf-8"))
        found += [f"{module}:{line}: {text[:80]}" for line, text in words if SENTENCE.search(text)]
    assert found == []
