"""An HTTP server for an exported model, with dynamic batching: `mlx-transformer serve ONNX`, `python -m export serve`.

The files beside this one need the extra `serve`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from export.settings import ServeSettings
from mlx_transformer.spec.errors import UserError


def serve(model: str | Path, **settings: Any) -> None:
    """Serve `model`, a folder or one file with the search, until SIGTERM, SIGHUP or Ctrl-C (KeyboardInterrupt).

    settings: the fields of `export.settings.ServeSettings`, such as host="0.0.0.0", port=8000, workers=2.
    `UserError` for what can't be served, and without the extra `serve`.
    """
    chosen = ServeSettings(**settings)
    try:
        from .server import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("starlette", "uvicorn", "httptools", "prometheus_client"):
            raise
        raise UserError(f"serve needs {missing}: pip install -e '.[serve]' in the project's folder") from None
    run(Path(model), chosen)
