"""The rules of style that a test can hold: no sentence of a docstring or a comment begins with "Of", "What" or "Whose",
and the names of arguments, variables and attributes say what a thing is, for which a participle alone is not enough."""

import ast
import io
import re
import tokenize

import pytest
from imports import modules

WORDS = re.compile(r"\b(?:Of|What|Whose)\s")
SENTENCE = re.compile(r"(?:^|[.:;?!)]\s+|\n\s*\n\s*)(?:Of|What|Whose)\s+(?!course\b)")
PARTICIPLES = {"asked", "beside", "found", "given", "held", "kept", "said", "shown", "told", "wanted"}
PUBLIC = {("export.settings", "beside"): "--with of `explain`, a word that Python keeps for itself"}


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


@pytest.mark.parametrize("text", ["Of one head.", "Shapes. Of `rows`: theirs.", "Gives it.\n\n    What is left."])
def test_a_sentence_that_begins_so_is_seen(text: str) -> None:
    assert SENTENCE.search(text)


@pytest.mark.parametrize("text", ["The mean of one head.", "Offsets.", "Of course it is.", "Say what it is."])
def test_other_words_are_not(text: str) -> None:
    assert not SENTENCE.search(text)


def test_no_sentence_begins_so() -> None:
    found = []
    for module, path in sorted(modules().items()):
        source = path.read_text(encoding="utf-8")
        words = words_of(source) if WORDS.search(source) else []  # to read tokens takes long
        found += [f"{module}:{line}: {text[:80]}" for line, text in words if SENTENCE.search(text)]
    assert found == []


def names_of(source: str) -> list[tuple[int, str]]:
    """(line, name) of everything that is named in a source: functions, classes, arguments, variables and attributes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            found.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((node.lineno, node.attr))
    return found


def test_a_participle_is_seen_wherever_it_names_something() -> None:
    source = "class A:\n def _held(self, given):\n  self.kept = found = lambda told: told"
    assert {name.strip("_") for _, name in names_of(source)} & PARTICIPLES == {"held", "given", "kept", "found", "told"}


def test_no_participle_stands_alone() -> None:
    found = []
    for module, path in sorted(modules().items()):
        names = names_of(path.read_text(encoding="utf-8"))
        names = [(line, name) for line, name in names if (module, name) not in PUBLIC]
        found += [f"{module}:{line}: {name}" for line, name in names if name.strip("_") in PARTICIPLES]
    assert found == []
