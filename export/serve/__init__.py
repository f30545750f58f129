"""An HTTP server for an exported model, with dynamic batching: `mlx-transformer serve ONNX`, `python -m export serve`.

The files beside this one need the extra `serve`.
"""

from __future__ import annotations

from pathlib import Path

from mlx_transformer.spec.errors import UserError


def serve(
    model: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_batch: int = 32,
    max_wait_ms: float = 5.0,
    max_queue: int = 1024,
    threads: int | None = None,
    workers: int = 1,
    precision: str | None = None,
    access_log: bool = False,
    verify: bool = True,
) -> None:
    """Serve the folder `model` until SIGTERM or Ctrl-C (KeyboardInterrupt).

    max_batch: most sentences computed together. max_wait_ms: how long one waits for others while a worker is idle.
    max_queue: most sentences waiting; beyond it requests get 503. workers: batches computed at the same time, each with
    `threads` threads (None: the machine's cores). precision: one of the folder's (None: float32, or the only one).
    verify: compare its files with the digests in its manifest.
    `UserError` for what can't be served, and without the extra `serve`.
    """
    try:
        from .server import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise UserError(f"serve needs {missing}: pip install -e '.[serve]' in the project's folder") from None
    run(Path(model), host, port, max_batch, max_wait_ms, max_queue, threads, workers, precision, access_log, verify)
