"""The figures of the claims that pages show, drawn by docs/claims."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from mlx_transformer.system.errors import UserError

from .directives import figures_wanted
from .problem import Problem


def draw(root: Path, folder: Path) -> Path | None:
    """Write the figures that pages of docs/ ask for into `folder`. None without matplotlib."""
    if find_spec("matplotlib") is None:
        print("without figures: matplotlib isn't installed (pip install -e '.[plots]')")
        return None
    texts = [page.read_text(encoding="utf-8") for page in (root / "docs").rglob("*.md")]
    rows = sorted(set().union(*map(figures_wanted, texts)))
    command = import_module("claims.command")
    try:
        with redirect_stdout(io.StringIO()):
            command.claims([str(row) for row in rows], None, str(folder), True)
    except UserError as error:
        raise Problem(str(error)) from None
    return folder
