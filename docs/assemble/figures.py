"""The figures of the claims that pages show of a trained model, drawn by docs/claims; docs/pictures has the others."""

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
    """Write the figures that pages of docs/ ask for into `folder`. None without matplotlib or a trained model."""
    if find_spec("matplotlib") is None:
        print("without figures: matplotlib isn't installed (pip install -e '.[plots]')")
        return None
    command = import_module("claims.command")
    if not (root / command.QUICKSTART).is_dir():
        print("without the figures of a trained model: make quickstart trains one")
        return None
    texts = [page.read_text(encoding="utf-8") for page in (root / "docs").rglob("*.md")]
    rows = sorted(set().union(*map(figures_wanted, texts)))
    try:
        with redirect_stdout(io.StringIO()):
            command.claims([str(row) for row in rows], None, str(folder), True)
    except UserError as error:
        raise Problem(str(error)) from None
    return folder
