"""The entry point. All that takes time to import comes after Ctrl-C has a handler."""

from __future__ import annotations

import sys

from .system.process import run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; raises `SystemExit` with the statuses that `system/process.py` describes, but for 0."""

    def command() -> int:
        from .system.lazy import check_export

        check_export()
        from .commands.app import invoke

        return invoke("mlx-transformer", list(sys.argv[1:] if arguments is None else arguments))

    if status := run("mlx-transformer", command, whole=arguments is None):
        raise SystemExit(status)
