"""An HTTP server for exported models, with dynamic batching: `mlx-transformer serve ONNX`, `python -m export serve`;
`serve --web SITE` serves a page with a model for the browser.

The other files of this folder need the extra `serve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from export.settings import ServeSettings
from mlx_transformer.system.errors import Name, UserError
from mlx_transformer.system.lazy import needs

if TYPE_CHECKING:
    from export.arguments import ServeArguments

SITE_SETTINGS = (
    *("host", "port", "max_connections", "verify", "access_log"),
    *("header_seconds", "body_seconds", "idle_seconds", "grace_seconds"),
)
"""The settings of a site."""


def serve(models: str | Path | Sequence[str | Path], open: Any = None, **settings: Unpack[ServeArguments]) -> None:
    """Serve models until SIGTERM, SIGHUP or Ctrl-C (raises KeyboardInterrupt).

    models: a folder or a file with the search, or several with names: ["en-de=runs/en-de-onnx", "de-en=..."].
    settings: the fields of `export.settings.ServeSettings`, e.g. host="0.0.0.0", port=8000, workers=2.
    open: opens models; default: with ONNX Runtime.
    Raises `UserError` for an unusable model or address, and without the extra `serve`.
    """
    with _naming_extra():
        from export.serve import app, batching, opening, server

    chosen = ServeSettings(**settings)
    named = opening.Named.of([models] if isinstance(models, str | Path) else models)
    open = open or opening.open_onnx
    for model in named:  # before anything is loaded
        opening.check(model.path, chosen, open)
    batcher = batching.Batcher(chosen.max_batch, chosen.max_wait_ms / 1000, chosen.max_queue, chosen.workers)
    load = partial(opening.load_all, named, chosen, open)
    server.run(app.App(load, batcher, chosen), ", ".join(str(model.path) for model in named), chosen)


def serve_site(folder: str | Path, **settings: Any) -> None:
    """Serve a site written by `write_site`. settings: those of connections, and `verify`; `UserError` for others."""
    chosen = ServeSettings(**settings)
    for field in fields(chosen):
        value = getattr(chosen, field.name)
        if field.name not in SITE_SETTINGS and (value or None) != (field.default or None):
            setting = Name(field.name, str(value))
            raise UserError("{} is a setting of models; a site runs in the browser: leave it out", setting)
    with _naming_extra():
        from export.serve import server
        from export.serve import server as site

    server.run(site.SiteApp(Path(folder), chosen.verify), str(folder), chosen)


@contextmanager
def _naming_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("starlette", "uvicorn", "httptools", "prometheus_client"):
            raise
        raise UserError(f"serve needs {missing}: {needs('serve')}") from None
