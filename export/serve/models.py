"""The models of a server: their interface and names, and the choice of a model for a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from export.settings import ServeSettings
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import HeadKind
from mlx_transformer.decoding.options import Hypothesis, Options
from mlx_transformer.decoding.search import SharedSearch
from mlx_transformer.families.languages import short_codes
from mlx_transformer.generation.alignment import Alignment, align
from mlx_transformer.generation.embed import Embedder
from mlx_transformer.generation.heads import EncoderHead
from mlx_transformer.generation.settings import Settings
from mlx_transformer.generation.translate import Translator
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .batching import Batcher
from .metrics import Metrics
from .requests import RequestError

T = TypeVar("T")

SHORT_TEXT = 2000  # characters; tokenizing fewer takes less time than switching to a thread
AUTO = "auto"
"""LibreTranslate's name for an unknown source language."""
NO_LANGUAGES = "this server was not told its model's languages; leave it out, or start it with: serve en-de=DIR"
NO_STREAM = (
    "this server's model is one file, which gives whole texts: send the text to /translate, leave out stream and "
    "logprobs, or serve its folder"
)
NO_TRANSLATOR = (
    "this server has no translator; its models take POST /v1/chat/completions, /v1/completions, /v1/embeddings, "
    "/rerank or /predict"
)


class Model(Protocol):
    """The interface of a model. Calls come from as many threads as the server has workers. A model without
    steps (`has_steps`) has no `generate`."""

    has_steps: bool

    @property
    def config(self) -> TransformerConfig: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def translator(self) -> Translator: ...
    @property
    def depends_on_batch(self) -> bool: ...
    @property
    def depends_on_rounding(self) -> bool: ...
    @property
    def generation(self) -> Settings: ...
    def generate(self, ids: list[list[int]], *, share: SharedSearch, **options: Any) -> list[list[int]]: ...
    def search(
        self, ids: list[list[int]], *, attention: bool = False, share: SharedSearch, **options: Any
    ) -> list[list[Hypothesis]]: ...
    def stream(self, line: str, **options: Any) -> Iterator[str]: ...
    def decoding(self) -> AbstractContextManager[Any]: ...
    def embedder(self, **options: Any) -> Embedder: ...
    def encoder_head(self, kind: HeadKind, verb: str) -> EncoderHead: ...


@dataclass(frozen=True)
class Named:
    """A model's name and place. languages: source and target, if the name holds them."""

    name: str
    path: Path
    languages: tuple[str, str] | None = None

    @classmethod
    def of(cls, arguments: Sequence[str | Path]) -> list[Named]:
        """Read PATH or NAME=PATH: en-de=runs/en-de-onnx, zh-Hans:en=DIR, stories=DIR. `UserError` for equal names."""
        models = [cls._of(argument) for argument in arguments]
        if not models:
            raise UserError("serve takes at least one model")
        names = [entry.name for entry in models]
        for argument, name in zip(arguments, names, strict=True):
            if names.count(name) > 1:
                raise UserError(
                    f"{argument}: another model is called {name}; give each its own name: en-de=DIR de-en=DIR"
                )
        return models

    @classmethod
    def _of(cls, argument: str | Path) -> Named:
        name, equals, path = str(argument).partition("=")
        if not equals or Path(argument).exists():
            return cls(Path(argument).resolve().name or "model", Path(argument))
        if not name or not path:
            raise UserError(f"{argument}: give a name and a model: en-de=DIR")
        codes = name.split(":" if ":" in name else "-")
        languages = (codes[0], codes[1]) if len(codes) == 2 and all(codes) else None
        return cls(name, Path(path), languages)


class Loaded:
    """A loaded model, with the shared queue and counters. Its subclasses are the kinds of model
    in the table of routes. label: its group in /openapi.json; use: where its requests go, as part of an error."""

    label: ClassVar[str] = "server"
    use: ClassVar[str]
    translates: ClassVar[bool] = False

    def __init__(self, model: Model, batcher: Batcher, metrics: Metrics, settings: ServeSettings, name: str):
        self.model, self.batcher, self.metrics, self.settings, self.name = model, batcher, metrics, settings, name
        self.max_sentences = min(settings.max_sentences, batcher.share)

    async def compute(
        self, task: Any, payloads: Sequence[Any], lengths: Sequence[int], client: Hashable, width: int = 1
    ) -> list[Any]:
        """Queue the payloads and await their results."""
        return await self.batcher.results(self.batcher.submit(task, payloads, lengths, client=client, width=width))

    def count(self, sentences: int, tokens: int = 0) -> None:
        self.metrics.sentences.inc(sentences)
        self.metrics.tokens.inc(tokens)


L = TypeVar("L", bound=Loaded)


class Models:
    """The loaded models by name, and translators by their languages. `UserError` if no request could choose between
    two translators; `RequestError` if a request fits none."""

    def __init__(self, loaded: Iterable[tuple[Named, Loaded]]):
        self.by_name: dict[str, Loaded] = {}
        self.translators: dict[tuple[str, str], Any] = {}
        nameless = []
        for named, model in loaded:
            self.by_name[named.name] = model
            if not model.translates:
                continue
            if named.languages in self.translators:
                raise UserError(f"{named.path}: another model translates {'-'.join(named.languages)} already")
            if named.languages is None:
                nameless.append(model)
            else:
                self.translators[named.languages] = model
        if len(nameless) > 1 or (nameless and self.translators):
            raise UserError("several translators are chosen by language: give each its languages, as en-de=DIR")
        self.only: Any = nameless[0] if nameless else None

    @property
    def names(self) -> list[str]:
        return list(self.by_name)

    def named(self, kind: type[L], name: str) -> L:
        """Find a model of a kind; the error for another kind says where its requests go."""
        model = self.by_name.get(name)
        if isinstance(model, kind):
            return model
        raise self.unknown(name) if model is None else RequestError(400, f"model: {name} {model.use}", "wrong_model")

    def fitting(self, kind: type[L], name: str | None, fits: Callable[[L], bool], missing: str) -> L:
        """Find a model of a kind by name, or the only fitting model. missing: the error if none does."""
        if name is not None:
            return self.named(kind, name)
        found = [model for model in self.by_name.values() if isinstance(model, kind) and fits(model)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise RequestError(400, f"this server has no model {missing}")
        raise RequestError(400, f"model: several fit, say which: {', '.join(model.name for model in found)}")

    def unknown(self, name: str) -> RequestError:
        known = ", ".join(self.by_name)
        return RequestError(404, f"model: there is no {name[:50]!r}; there are {known}", "model_not_found")

    def translator(self, source: str | None, target: str | None) -> tuple[Any, str | None]:
        """Find the translator for two languages, and its source. None and `AUTO` mean the only possible one."""
        if self.only is not None and self.only.languages:
            return self.only, source
        if self.only is not None:
            for name, code in (("source", source), ("target", target)):
                if code is not None:
                    raise RequestError(400, f"{name}: {NO_LANGUAGES}")
            return self.only, None
        if not self.translators:
            raise RequestError(400, NO_TRANSLATOR)
        wanted = (None if source == AUTO else source, target)
        fitting = [pair for pair in self.translators if all(w in (None, p) for w, p in zip(wanted, pair, strict=True))]
        if len(fitting) == 1:
            return self.translators[fitting[0]], fitting[0][0]
        pairs = ", ".join("-".join(pair) for pair in self.translators)
        if not fitting:
            raise RequestError(400, f"source={source}, target={target}: this server translates {pairs}")
        missing = "source" if source in (None, AUTO) else "target"
        also = "; this server detects no languages" if source == AUTO else ""
        raise RequestError(400, f"{missing}: several fit, say which; this server translates {pairs}{also}")

    def only_source(self) -> str:
        """The only source language; `RequestError` if there are several or none."""
        sources = {source for source, _ in self.translators} if self.only is None else {*self.languages()}
        if len(sources) != 1:
            raise RequestError(400, f"this server detects no languages; give source: {', '.join(sorted(sources))}")
        return sources.pop()

    def languages(self) -> dict[str, list[str]]:
        """Map each language to its targets."""
        if self.only is not None:
            known = sorted(short_codes(self.only.languages))
            return {code: [target for target in known if target != code] for code in known}
        codes = sorted({code for pair in self.translators for code in pair})
        return {code: sorted(target for source, target in self.translators if source == code) for code in codes}


# Searching in batches, for translations and completions.
@dataclass(frozen=True)
class Row:
    """A sentence to search. ids: token ids, or text if the file takes text. place: its position in the
    request, which seeds sampling."""

    ids: Any
    place: int


@dataclass(frozen=True)
class Aligned(Hypothesis):
    """A hypothesis with word links instead of attention weights, which take far more memory."""

    alignment: Alignment = field(kw_only=True)


@dataclass(frozen=True)
class Search:
    """A task: search rows; rows with equal options share a batch.

    scored: return all hypotheses with scores, not only the best ids. aligned: add word links. Models whose results
    depend on the batch (int4) search each row by itself, so that no answer depends on other clients' requests.
    """

    model: Model = field(compare=False)
    name: str  # distinguishes models of the same server
    options: Options
    scored: bool
    aligned: bool = False

    def __call__(self, payloads: list[Row], stopped: Callable[[], bool]) -> list[list[Hypothesis]]:
        if self.model.depends_on_batch and len(payloads) > 1:
            return [hypotheses for row in payloads for hypotheses in self([row], stopped)]
        ids = [row.ids for row in payloads]
        share = SharedSearch(row_numbers=[row.place for row in payloads], stopped=stopped)
        options = asdict(self.options)
        if self.aligned:
            outputs = self.model.search(ids, attention=True, share=share, **options)
            tokenizer = self.model.translator.tokenizer
            return [[_aligned(tokenizer, row, h) for h in best] for row, best in zip(ids, outputs, strict=True)]
        if self.scored:
            return self.model.search(ids, share=share, **options)
        return [[Hypothesis(best, 0.0)] for best in self.model.generate(ids, share=share, **options)]


def _aligned(tokenizer: Tokenizer, source: list[int], h: Hypothesis) -> Hypothesis:
    assert h.attention is not None
    return Aligned(h.ids, h.score, alignment=align(tokenizer, h.attention, source, h.ids))


def check_lengths(lengths: Mapping[str, int | None], most: int) -> None:
    """Refuse more new tokens than the model has positions; without a position table, nothing else would stop a search.
    lengths: {field of the request: most new tokens}."""
    for name, tokens in lengths.items():
        if (tokens or 0) > most:
            raise RequestError(400, f"{name}={tokens}: this server takes at most {most}")


async def without_blocking(characters: int, work: Callable[..., T], *arguments: Any) -> T:
    """Call `work`, in a thread if the text is long, so other requests don't wait."""
    return work(*arguments) if characters < SHORT_TEXT else await asyncio.to_thread(work, *arguments)
