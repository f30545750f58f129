"""Models opened to be served: by ONNX Runtime, or by what the caller opens others with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from export.runtime.folder import open_folder
from export.search.metadata import check_file
from export.settings import ServeSettings
from mlx_transformer.core.folders import is_onnx_folder
from mlx_transformer.system.errors import UserError

from .models import Named
from .one_file import OneFile
from .service import Model

if TYPE_CHECKING:
    from mlx_transformer.generation.verbs import TextVerbs

Open = Callable[..., "TextVerbs"]
"""open(path, threads=, precision=, verify=): a model with its verbs."""


def open_onnx(path: Path, *, threads: int | None, precision: str | None, verify: bool) -> TextVerbs:
    """Open a folder or a file for ONNX Runtime."""
    from export.runtime import OnnxTransformer
    from export.search import open_file

    if path.is_file():
        return open_file(path, threads=threads, verify=verify)
    return OnnxTransformer(path, threads=threads, precision=precision, verify=verify)


def check(path: Path, settings: ServeSettings, open: Open) -> None:
    """Raise `UserError` for what can be seen not to be served without loading it; a name on the Hub is fetched."""
    if open is not open_onnx:
        from mlx_transformer.families.hub import find_model

        path = find_model(path).folder
    if path.is_file():
        check_file(path, settings.precision)
    elif open is open_onnx or not path.is_dir() or is_onnx_folder(path):
        open_folder(path, settings.precision)
    elif settings.workers > 1:
        raise UserError(f"{path}: is a checkpoint, and MLX computes one batch at a time: leave out --workers")


def load_all(models: Sequence[Named], settings: ServeSettings, open: Open) -> dict[Named, Model]:
    """Open each model, and run it once."""
    services = {}
    for named in models:
        options = {"threads": settings.threads, "precision": settings.precision, "verify": settings.verify}
        opened = open(named.path, **options)
        if settings.shortlist is not None and (opened.config.architecture != "encoder-decoder" or opened.takes_text):
            what = "takes text, whose tokens are its own" if opened.takes_text else "doesn't translate"
            raise UserError(f"{named.path}: {what}: leave out --shortlist")
        opened.use_shortlist(settings.shortlist)
        services[named] = warmed(opened)
    return services


def warmed(model: Any) -> Model:
    """Return the model after a first run, so that no request pays for what is set up then."""
    if model.config.architecture == "encoder":
        if not model.has_steps:
            raise UserError(f"{model.where}: takes text alone, and the server batches ids: export a folder")
        model.classify(".") if model.config.head.kind == "classes" else model.embed(".")
        return cast(Model, model)
    for beam in (1, 2):
        if model.config.architecture == "decoder":
            model.generate([[model.config.bos_id]], beam=beam, max_new_tokens=3)
        else:
            model.translate(["."], beam=beam, max_new_tokens=3)
    return cast(Model, model if model.has_steps else OneFile(model))  # a cached_property is a property to us
