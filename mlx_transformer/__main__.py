"""The program `mlx-transformer`, also started by `python -m mlx_transformer`."""

from mlx_transformer.system.early import stop_quietly

stop_quietly("mlx-transformer")

from mlx_transformer.cli import main  # noqa: E402 - Ctrl-C is handled before slow imports

if __name__ == "__main__":
    main()
