"""`python -m export`: the commands of `mlx-transformer` that work without MLX; `export` is called `build` here."""

from __future__ import annotations

from mlx_transformer.system.early import stop_quietly

if __name__ == "__main__":
    stop_quietly("python -m export")

import sys

from mlx_transformer.system.process import run


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status as described at `process.run`."""

    def command() -> int:
        from mlx_transformer.commands.app import invoke

        return invoke("python -m export", sys.argv[1:] if arguments is None else arguments)

    return run("python -m export", command, whole=arguments is None)


if __name__ == "__main__":
    raise SystemExit(main())
