"""Run a notebook's code cells as Jupyter does, in one namespace: python notebook_cells.py NOTEBOOK [PARAMETERS].

PARAMETERS takes the place of the cell that is tagged so. Prints what the last expression of each cell shows itself as.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path


def run(notebook: Path, parameters: str | None = None) -> None:
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


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    run(Path(sys.argv[1]), *sys.argv[2:])
