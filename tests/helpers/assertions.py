"""Which test functions assert something on every path, and which asserts can't fail, read from the syntax trees.

A statement asserts if it is an `assert` or a `raise AssertionError`, or calls what raises where things differ: pytest's
and NumPy's assertions, those of `export.validate`, or a function of the tests that asserts. An `if` counts if both its
branches assert, a `try` if its handlers do, a loop if its body does: whether it runs at all can't be read here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CALLS = ("pytest.raises", "pytest.warns", "pytest.fail", "np.testing.assert_", "assert_equal")
"""Beginnings of the dotted names of functions that assert."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_below(folder: Path) -> dict[str, ast.Module]:
    """By their paths below the folder; helpers, which tests import, by their names alone."""
    paths = {path.relative_to(folder): path for path in sorted(folder.rglob("*.py"))}
    return {
        str(short) if short.name.startswith("test_") else short.stem: ast.parse(path.read_text(encoding="utf-8"))
        for short, path in paths.items()
    }


def idle_tests(files: dict[str, ast.Module]) -> Iterator[str]:
    """Test functions that may pass without having asserted anything, as "file::name"."""
    for file, tree in files.items():
        tests = [node for node in ast.walk(tree) if isinstance(node, Function) and node.name.startswith("test_")]
        for test in tests if Path(file).name.startswith("test_") else ():
            if not Reader(files, file, (test,)).asserts(test.body):
                yield f"{file}::{test.name}"


def hollow_asserts(files: dict[str, ast.Module]) -> Iterator[str]:
    """Asserts that hold whatever the code under test does, as "file:line: condition"."""
    for file, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert) and always(node.test):
                yield f"{file}:{node.lineno}: {ast.unparse(node.test)}"


@dataclass(frozen=True)
class Reader:
    """Reads the last of the functions `inside`, of `file`; the others have called it."""

    files: dict[str, ast.Module]
    file: str
    functions: tuple[Function, ...]

    def asserts(self, body: Sequence[ast.stmt]) -> bool:
        return any(self._statement(node) for node in body)

    def _statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Assert():
                return True
            case ast.Raise(exc=ast.expr()):
                return ast.unparse(node.exc).startswith("AssertionError")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return False
            case ast.If():
                return self._calls(node.test) or (self.asserts(node.body) and self.asserts(node.orelse))
            case ast.For() | ast.AsyncFor():
                return self._calls(node.iter) or self.asserts(node.body) or self.asserts(node.orelse)
            case ast.While():
                return self._calls(node.test) or self.asserts(node.body)
            case ast.With() | ast.AsyncWith():
                return any(self._calls(item.context_expr) for item in node.items) or self.asserts(node.body)
            case ast.Try():
                handled = all(self.asserts(handler.body) for handler in node.handlers)
                return self.asserts(node.finalbody) or (handled and self.asserts([*node.body, *node.orelse]))
        return self._calls(node)

    def _calls(self, node: ast.AST) -> bool:
        return any(self._call(call.func) for call in ast.walk(node) if isinstance(call, ast.Call))

    def _call(self, called: ast.expr) -> bool:
        if _dotted(called).startswith(CALLS):
            return True
        definition = self._definition(self.file, called.id) if isinstance(called, ast.Name) else None
        if definition is None or definition[1] in self.functions:
            return False
        file, function = definition
        return Reader(self.files, file, (*self.functions, function)).asserts(function.body)

    def _definition(self, file: str, name: str) -> tuple[str, Function] | None:
        """A function inside the one that is read, of its file, or of the file it is imported from."""
        for place in (self.functions[-1], self.files[file]):
            match _defined(place).get(name):
                case ast.ImportFrom(module=str(module), names=names) if module in self.files:
                    original = next(alias.name for alias in names if name == (alias.asname or alias.name))
                    return self._definition(module, original)
                case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
                    return file, node
        return None


def _dotted(node: ast.expr) -> str:
    """a.b.c of a name; nothing before the dot of what is none, as `ast.unparse` gives it in ten times the time."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@cache
def _defined(place: ast.AST) -> dict[str, ast.AST]:
    """By name, the function in it that is called so, or the import that it comes from; of several the first."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(place):
        if isinstance(node, Function):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, node)
    return found


def always(test: ast.expr) -> bool:
    """Whether a condition holds by its form: a constant, `x or True`, x == x without a call, len(x) >= 0."""
    match test:
        case ast.Constant():
            return bool(test.value)
        case ast.Tuple() | ast.JoinedStr() | ast.GeneratorExp() | ast.Lambda():
            return True
        case ast.BoolOp(op=ast.Or()):
            return any(always(value) for value in test.values)
        case ast.BoolOp():
            return all(always(value) for value in test.values)
        case ast.Compare(ops=[ast.GtE()], comparators=[ast.Constant(value=0)]):
            return isinstance(test.left, ast.Call) and ast.unparse(test.left.func) == "len"
        case ast.Compare(ops=[ast.Eq() | ast.LtE() | ast.GtE() | ast.Is()]):
            called = any(isinstance(node, ast.Call) for node in ast.walk(test))
            return not called and ast.dump(test.left) == ast.dump(test.comparators[0])
    return False
