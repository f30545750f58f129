"""The program `mlx-transformer`, and `python -m mlx_transformer` where it is not on the path."""

from mlx_transformer.system.early import stop_quietly

stop_quietly("mlx-transformer")

from mlx_transformer.cli import main  # noqa: E402 - Ctrl-C first

if __name__ == "__main__":
    main()
