"""OpenAI's form of requests and answers for vectors of texts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_transformer.generation.embed_files import FORMS

from .embedding import EmbeddingsRequest, Made
from .requests import RequestError, texts_or_ids

EMBEDDINGS_EXAMPLE = '{"model": "minilm", "input": ["Good morning."]}'
FORMATS = ("float", "base64")
OPTIONS = ("dimensions", "kind", "prompt", "prompt_name")


@dataclass(frozen=True)
class OpenAIEmbeddings:
    """model: its name. as_base64: a vector is answered as the bytes of float32, little-endian; weights and vectors of
    tokens, which OpenAI has none of and whose clients ask for base64 by themselves, are numbers all the same."""

    model: str
    request: EmbeddingsRequest
    as_base64: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> OpenAIEmbeddings:
        """Read the fields of a body. A field that is null was not given; `kind`, `prompt` and `prompt_name` are of this
        server alone."""
        values = {name: value for name, value in values.items() if value is not None}
        model = values.pop("model", None)
        if not isinstance(model, str) or "input" not in values:
            raise RequestError(400, f'body: "model" and "input" are needed; send {EMBEDDINGS_EXAMPLE}')
        inputs = texts_or_ids("input", values.pop("input"))
        form = values.pop("encoding_format", FORMATS[0])
        if form not in FORMATS:
            raise RequestError(400, f"encoding_format: must be {' or '.join(FORMATS)}")
        values.pop("user", None)  # whose text it is, which changes nothing
        options = {name: values.pop(name) for name in OPTIONS if name in values}
        if values:
            known = ", ".join(("model", "input", "encoding_format", *OPTIONS))
            raise RequestError(400, f"{next(iter(values))[:50]!r}: no such setting; there are {known}")
        return cls(model, EmbeddingsRequest(inputs, options), form == "base64")

    def answer(self, made: Sequence[Made], tokens: int) -> dict[str, Any]:
        """Write an answer: what is made of a text stands under the key that `embed --kind` has for it, and a client
        finds an `embedding` in any case, for it looks for one."""
        kind = self.request.options.get("kind", "dense")
        key, form = ("embedding", _base64) if kind == "dense" and self.as_base64 else FORMS[kind]
        data = [{"object": "embedding", "index": i, "embedding": None, key: form(x)} for i, x in enumerate(made)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}


def _base64(vector: Made) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
