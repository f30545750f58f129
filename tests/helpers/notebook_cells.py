"""A notebook's code cells."""

from __future__ import annotations

import ast
import json
from pathlib import Path


def run(notebook: Path, parameters: str | None = None) -> None:
    """Run the cells as Jupyter does, in one namespace, and print what the last expression of each shows itself as.

    parameters: code in the place of the cell that is tagged so.
    """
    namespace: dict = {"__name__": "__main__"}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        if parameters is not None and "parameters" in cell["metadata"].get("tags", []):
            source = parameters
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, cell["id"], "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), namespace)
            shown = getattr(value, "_repr_html_", None)
            print(repr(value) if shown is None else shown(), flush=True)
