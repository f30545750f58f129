"""The models of one server: how they are named, and which of them a request is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlx_transformer.families.language_codes import short_codes
from mlx_transformer.system.errors import UserError

from .completing import Completions
from .embedding import Embeddings
from .labelling import Labels
from .requests import AUTO, RequestError
from .service import Service

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """A model's place and name. languages: source and target, where its name says them."""

    name: str
    path: Path
    languages: tuple[str, str] | None = None

    @classmethod
    def of(cls, arguments: Sequence[str | Path]) -> list[Named]:
        """Read PATH alone, or NAME=PATH of each: en-de=runs/en-de-onnx, zh-Hans:en=..., stories=... `UserError` if
        their names don't tell them apart."""
        models = [cls._one(argument) for argument in arguments]
        if not models:
            raise UserError("serve takes at least one model")
        names = [entry.name for entry in models]
        for argument, name in zip(arguments, names, strict=True):
            if names.count(name) > 1:
                raise UserError(f"{argument}: another model is called {name}; name each: en-de=DIR de-en=DIR")
        return models

    @classmethod
    def _one(cls, argument: str | Path) -> Named:
        name, equals, path = str(argument).partition("=")
        if not equals or Path(argument).exists():
            return cls(Path(argument).resolve().name or "model", Path(argument))
        if not name or not path:
            raise UserError(f"{argument}: give a name and a model: en-de=DIR")
        codes = name.split(":" if ":" in name else "-")
        languages = (codes[0], codes[1]) if len(codes) == 2 and all(codes) else None
        return cls(name, Path(path), languages)


class Models:
    """Translators, writers of completions, makers of vectors and classifiers, each by its name. `UserError` for
    translators that no request could name.

    Raises `RequestError` for a request that is for none of them.
    """

    def __init__(self, services: Iterable[tuple[Named, Service | Completions | Embeddings | Labels]]):
        self.completions: dict[str, Completions] = {}
        self.embeddings: dict[str, Embeddings] = {}
        self.labellers: dict[str, Labels] = {}
        self.translators: dict[tuple[str, str], Service] = {}
        self.only: Service | None = None  # without languages
        self.names: list[str] = []
        for named, model in services:
            self.names.append(named.name)
            if isinstance(model, Completions):
                self.completions[named.name] = model
            elif isinstance(model, Embeddings):
                self.embeddings[named.name] = model
            elif isinstance(model, Labels):
                self.labellers[named.name] = model
            elif named.languages in self.translators:
                raise UserError(f"{named.path}: another model translates {'-'.join(named.languages)} already")
            elif named.languages is not None:
                self.translators[named.languages] = model
            elif self.only is None:
                self.only = model
        others = (self.completions, self.embeddings, self.labellers, self.translators)
        nameless = len(self.names) - sum(map(len, others))
        if nameless > 1 or (nameless and self.translators):
            raise UserError("several translators are chosen by language: give each its languages, as en-de=DIR")

    def translator(self, source: str | None, target: str | None) -> tuple[Service, str | None]:
        """Return the model that translates so, and its source language. None or `AUTO`: there is only one."""
        if self.only is not None and self.only.languages:
            return self.only, source
        if self.only is not None:
            for name, code in (("source", source), ("target", target)):
                if code is not None:
                    raise RequestError(400, f"{name}: {NO_LANGUAGES}")
            return self.only, None
        if not self.translators:
            raise RequestError(400, NO_TRANSLATOR)
        languages = (None if source == AUTO else source, target)
        fitting = [
            pair for pair in self.translators if all(w in (None, p) for w, p in zip(languages, pair, strict=True))
        ]
        if len(fitting) == 1:
            return self.translators[fitting[0]], fitting[0][0]
        there = ", ".join("-".join(pair) for pair in self.translators)
        if not fitting:
            raise RequestError(400, f"source={source}, target={target}: this server translates {there}")
        missing = "source" if source in (None, AUTO) else "target"
        also = "; this server detects no languages" if source == AUTO else ""
        raise RequestError(400, f"{missing}: several fit, say which; this server translates {there}{also}")

    def only_source(self) -> str:
        """Return the language that every text is in; `RequestError` if there are several, or none is known."""
        sources = {source for source, _ in self.translators} if self.only is None else {*self.languages()}
        if len(sources) != 1:
            raise RequestError(400, f"this server detects no languages; give source: {', '.join(sorted(sources))}")
        return sources.pop()

    def languages(self) -> dict[str, list[str]]:
        """Return the targets of every language that is one side of a pair, or that the only model has."""
        if self.only is not None:
            known = sorted(short_codes(self.only.languages))
            return {code: [target for target in known if target != code] for code in known}
        codes = sorted({code for pair in self.translators for code in pair})
        return {code: sorted(target for source, target in self.translators if source == code) for code in codes}

    def writer(self, name: str) -> Completions:
        """Return the decoder of that name, which completes prompts."""
        return self._named(self.completions, name)

    def embedder(self, name: str) -> Embeddings:
        """Return the encoder of that name, which turns texts into vectors."""
        return self._named(self.embeddings, name)

    def labeller(self, name: str | None, reranks: bool = False) -> Labels:
        """Return the encoder with classes of that name; None: the only one, or with `reranks` the only one that has one
        class."""
        if name is not None:
            return self._named(self.labellers, name)
        fitting = [each for each in self.labellers.values() if not reranks or each.reranks]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            raise RequestError(400, f"this server has no model {'with one class' if reranks else 'with classes'}")
        raise RequestError(400, f"model: several fit, say which: {', '.join(each.name for each in fitting)}")

    def _named(self, models: Mapping[str, T], name: str) -> T:
        """Return the model of that name among those of the wanted kind; the error says what another one is for."""
        if name in models:
            return models[name]
        uses = dict.fromkeys(self.names, "is a translator; send its text to /translate")
        uses |= dict.fromkeys(self.completions, "completes prompts; send them to /v1/completions")
        uses |= dict.fromkeys(self.embeddings, "makes vectors; send its texts to /v1/embeddings")
        uses |= dict.fromkeys(self.labellers, "tells classes; send its texts to /predict, or queries to /rerank")
        raise RequestError(400, f"model: {name} {uses[name]}", "wrong_model") if name in uses else self.unknown(name)

    def unknown(self, name: str) -> RequestError:
        """Make the error for a name that no model has."""
        return RequestError(404, f"model: there is no {name[:50]!r}; there are {', '.join(self.names)}", UNKNOWN)


UNKNOWN = "model_not_found"
NO_LANGUAGES = "this server was not told its model's languages; leave it out, or start it with: serve en-de=DIR"
NO_TRANSLATOR = (
    "this server has no translator; its models take POST /v1/completions, /v1/embeddings, /rerank or /predict"
)
