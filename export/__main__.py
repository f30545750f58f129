"""`python -m export build | translate | serve | validate`: the ONNX side where there is no MLX."""

from __future__ import annotations

from mlx_transformer.spec.process import run


def main(arguments: list[str] | None = None) -> int:
    """The exit status, as `process.run` describes it."""

    def command() -> int:
        from .command_line import invoke

        return invoke(arguments)

    return run("python -m export", command, whole=arguments is None)


if __name__ == "__main__":
    raise SystemExit(main())
