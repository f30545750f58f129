"""What an engine can do is said in its `capabilities` and methods: nobody asks an engine for an attribute by name."""

import ast
from pathlib import Path

import pytest

import export.validate

SOURCES = sorted(Path(export.validate.__file__).parent.rglob("*.py"))
MODULES = ("os",)  # what a system lacks


def asked(source: str) -> list[str]:
    """Return the calls of getattr and hasattr with an attribute's name spelled out, but those of `MODULES`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")]
    literal = [call for call in named if isinstance(call.args[1], ast.Constant)]
    return [ast.unparse(call) for call in literal if ast.unparse(call.args[0]) not in MODULES]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_engine_is_asked_for_an_attribute_by_name(path: Path) -> None:
    assert asked(path.read_text(encoding="utf-8")) == []


def test_such_a_question_is_seen() -> None:
    source = 'x = getattr(engine, "files", {})\nhasattr(e, "files")\nhasattr(os, "geteuid")\ngetattr(library, name)'
    assert asked(source) == ["getattr(engine, 'files', {})", "hasattr(e, 'files')"]
