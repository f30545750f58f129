"""An HTTP server for an exported model, with dynamic batching: `mlx-transformer serve ONNX`, `python -m export serve`;
and one for a page that runs it in the browser, `serve --web SITE`.

The files beside this one need the extra `serve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from export.settings import ServeSettings
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.lazy import needs

OF_SITES = (
    *("host", "port", "max_connections", "verify", "access_log"),
    *("header_seconds", "body_seconds", "idle_seconds", "grace_seconds"),
)
"""The settings that concern a site as well."""


def serve(models: str | Path | Sequence[str | Path], open: Any = None, **settings: Any) -> None:
    """Serve models, each a folder or one file with the search, until SIGTERM, SIGHUP or Ctrl-C (KeyboardInterrupt).

    models: one, or several that are named, as ["en-de=runs/en-de-onnx", "de-en=runs/de-en-onnx"]. settings: the fields
    of `export.settings.ServeSettings`, such as host="0.0.0.0", port=8000, workers=2. open: opens other models than
    ONNX Runtime's. `UserError` for what can't be served, and without the extra `serve`.
    """
    server = _server()
    chosen = ServeSettings(**settings)
    named = server.Named.of([models] if isinstance(models, str | Path) else models)
    server.run(named, chosen, open or server.open_onnx)


def serve_site(folder: str | Path, **settings: Any) -> None:
    """Serve a site that `write_site` wrote. settings: those that have to do with connections, and `verify`;
    `UserError` for others."""
    chosen = ServeSettings(**settings)
    for field in fields(chosen):
        value = getattr(chosen, field.name)
        if field.name not in OF_SITES and (value or None) != (field.default or None):
            raise UserError(f"{field.name}={value} is a setting of models; a site runs in the browser: leave it out")
    _server().run_site(Path(folder), chosen)


def _server() -> Any:
    try:
        from . import server
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("starlette", "uvicorn", "httptools", "prometheus_client"):
            raise
        raise UserError(f"serve needs {missing}: {needs('serve')}") from None
    return server
