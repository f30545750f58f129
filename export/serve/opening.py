"""Models opened for the server: checked before it starts, loaded and run once before it is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from export.runtime.folder import open_folder
from export.search.metadata import check_file
from export.settings import PrecisionName, ServeSettings
from mlx_transformer.core.folders import Place
from mlx_transformer.decoding.options import Hypothesis
from mlx_transformer.decoding.search import SharedSearch
from mlx_transformer.generation.translate import Overlong, Translation, join
from mlx_transformer.system.errors import UserError

from .models import NO_STREAM, Model, Named
from .requests import RequestError

if TYPE_CHECKING:
    from export.search import SearchModel
    from mlx_transformer.generation.verbs import TextVerbs
    from mlx_transformer.text.tokenizer import Tokenizer

Open = Callable[..., "TextVerbs"]
"""open(path, threads=, precision=, verify=) -> a model with its verbs."""


def open_onnx(path: Path, *, threads: int | None, precision: PrecisionName | None, verify: bool) -> TextVerbs:
    """Open a folder or a single file with ONNX Runtime."""
    from export.runtime import OnnxTransformer
    from export.search import open_file

    if path.is_file():
        return open_file(path, threads=threads, verify=verify)
    return OnnxTransformer(path, threads=threads, precision=precision, verify=verify)


def check(path: Path, settings: ServeSettings, open: Open) -> None:
    """Raise `UserError` if a model's files show that it can't be served. Downloads models of the Hub."""
    if open is not open_onnx:
        from mlx_transformer.families.hub import find_model

        path = find_model(path).folder
    if path.is_file():
        check_file(path, settings.precision)
    elif open is open_onnx or Place.of(path).runs_onnx:
        open_folder(path, settings.precision)
    elif settings.workers > 1:
        raise UserError(f"{path}: is a checkpoint, and MLX computes one batch at a time: leave out --workers")


def load_all(models: Sequence[Named], settings: ServeSettings, open: Open) -> dict[Named, Model]:
    """Open all models and run each once."""
    loaded = {}
    for named in models:
        options = {"threads": settings.threads, "precision": settings.precision, "verify": settings.verify}
        opened = open(named.path, **options)
        if settings.shortlist is not None and (opened.config.architecture != "encoder-decoder" or opened.takes_text):
            why = "takes text, whose tokens are its own" if opened.takes_text else "doesn't translate"
            raise UserError(f"{named.path}: {why}: leave out --shortlist")
        opened.use_shortlist(settings.shortlist)
        loaded[named] = warmed(opened)
    return loaded


def warmed(model: Any) -> Model:
    """Run a model once, so no request pays for its setup."""
    if model.config.architecture == "encoder":
        if not model.has_steps:
            raise UserError(f"{model.where}: takes only text, but the server batches ids: export a folder")
        model.classify(".") if model.config.head.kind == "classes" else model.embed(".")
        return cast(Model, model)
    for beam in (1, 2):
        if model.config.architecture == "decoder":
            model.generate([[model.config.bos_id]], beam=beam, max_new_tokens=3)
        else:
            model.translate(["."], beam=beam, max_new_tokens=3)
    return cast(Model, model if model.has_steps else OneFile(model))  # its cached_property counts as a property


# Files with the search inside.
@dataclass(frozen=True)
class Text(Hypothesis):
    """An output whose text is known, but not its ids."""

    text: str


class OneFile:
    """A `SearchModel` as a `Model`. It computes whole texts, so it can't stream. If the file holds the tokenizer too,
    rows are text, and the number of generated tokens is unknown."""

    has_steps = False

    def __init__(self, model: SearchModel):
        self.model, self.config, self.generation = model, model.config, model.generation
        self.depends_on_batch = model.depends_on_batch

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer

    @cached_property
    def translator(self) -> Any:
        return TextRows(self.model) if self.model.takes_text else self.model.translator

    def search(self, rows: Sequence[Any], *, share: SharedSearch, **options: Any) -> Sequence[Sequence[Hypothesis]]:
        if not self.model.takes_text:
            return self.model.search(rows, share=share, **options)
        numbers = [1 + place for place in share.row_numbers or range(len(rows))]
        outputs = self.model.translated(rows, numbers, share=share, **options)
        return [[Text([], best.score, best.text) for best in each] for each in outputs]

    def stream(self, line: str, **options: Any) -> Iterator[str]:
        raise RequestError(400, NO_STREAM)


class TextRows:
    """The `Translator` of a file with its own tokenizer: rows are text."""

    shows_attention = False

    def __init__(self, model: SearchModel):
        self.model, self.config = model, model.config

    def rows(self, lines: Sequence[str], overlong: Overlong) -> tuple[list[int], list[str]]:
        return self.model.pieces(lines, overlong)

    def texts(self, lines: int, owners: Sequence[int], outputs: Sequence[Sequence[Text]]) -> list[list[Translation]]:
        return join(lines, owners, [[Translation(best.text, best.score) for best in each] for each in outputs])
