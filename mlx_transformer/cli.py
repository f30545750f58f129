"""The entry point of `mlx-transformer`. Slow imports come after the handler for Ctrl-C."""

from __future__ import annotations

import sys

from .system.process import run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, from `sys.argv` by default. Raises `SystemExit` with a status of `system/process.py` unless it is
    0."""

    def command() -> int:
        from .system.lazy import check_export

        check_export()
        from .commands.app import invoke

        return invoke("mlx-transformer", list(sys.argv[1:] if arguments is None else arguments))

    if status := run("mlx-transformer", command, whole=arguments is None):
        raise SystemExit(status)
