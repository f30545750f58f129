"""The shape of the code: no module imports itself by a detour, files have one purpose, twins have the same names."""

import ast
from collections.abc import Mapping

from imports import ROOT, imports_of, module_name, modules

FACE = 60  # lines of an __init__ that only hands names on
PARAMETERS = 8  # of a function: more of them are a settings object
ONLY_MLX = {
    "inputs": "ids are checked on the host",
    "quantize": "a pass over graphs (export/precision)",
    "dropout": "graphs don't train",
    "parameters": "graphs are filled as they are written",
    "checkpointing": "graphs have no gradients",
    "lora": "a graph gets an adapter by a pass (export/precision)",
}
ONLY_ONNX = {
    "marks": "what a graph says to those who change or judge it",
    "primitives": "what mlx.nn is on the other side",
    "rows": "layers of MLX have rows to take; a graph says which product it was",
}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert sorted(circles(graph)) == [["b", "c"], ["e", "f"]]


def test_no_module_imports_itself_by_a_detour():
    """Imports inside functions count; those of a face, which only hands names on, don't."""
    sources = {module_name(path): path.read_text(encoding="utf-8") for path in modules().values()}
    sources = {n: s for n, s in sources.items() if not n.endswith("__init__") or len(s.splitlines()) >= FACE}
    known = {name.removesuffix(".__init__"): name for name in sources}
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        targets = {entry.target for entry in imports_of(source, name)}
        targets |= {target.rpartition(".")[0] for target in targets}
        graph[name] = {known[target] for target in targets & known.keys()} - {name}
    assert circles(graph) == []


def test_no_function_has_many_parameters():
    many = []
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([each for each in arguments if each.arg not in ("self", "cls")])
                if count > PARAMETERS:
                    many.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {count}")
    assert not many


def test_twins_have_the_same_names():
    mlx, onnx = ({path.stem for path in (ROOT / place / "nn").glob("*.py")} for place in ("mlx_transformer", "export"))
    assert mlx - onnx == ONLY_MLX.keys()
    assert onnx - mlx == ONLY_ONNX.keys()
