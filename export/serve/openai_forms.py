"""OpenAI's forms of requests and answers for completions: what its clients send to /v1, and read.

All that a request may hold is honoured, or refused unless it has the value that changes nothing.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .completing import CompletionRequest, Written
from .requests import RequestError, flag, options_of, texts, texts_or_ids

EXAMPLE = '{"model": "stories", "prompt": "Once upon a time", "max_tokens": 16}'
MAX_TOKENS = 16  # where a request doesn't say
LARGEST_N = 64
# {what is not there: the values that ask for nothing}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (),
    "presence_penalty": (0,),
    "suffix": ("",),
}
ERRORS = {401: "invalid_api_key"}
TYPE = "text_completion"


@dataclass(frozen=True)
class OpenAIRequest:
    """model: its name. wants_usage: a stream ends with its counts."""

    model: str
    request: CompletionRequest
    stream: bool
    wants_usage: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> OpenAIRequest:
        """Read the fields of a body. A field that is null was not given."""
        values = {name: value for name, value in values.items() if value is not None}
        model = values.pop("model", None)
        if not isinstance(model, str) or "prompt" not in values:
            raise RequestError(400, f'body: "model" and "prompt" are needed; send {EXAMPLE}')
        prompts = texts_or_ids("prompt", values.pop("prompt"))
        stream = flag("stream", values.pop("stream", False))
        n = _whole(values.pop("n", 1), "n", 1, LARGEST_N)
        if values.pop("best_of", n) != n:
            raise RequestError(400, "best_of: all outputs are given; leave it out")
        usage = _usage(values.pop("stream_options", None), stream)
        stop = texts("stop", values.pop("stop", []))
        if not isinstance(values.pop("user", ""), str):
            raise RequestError(400, "user: must be a string")
        options = _options(values)
        for name, value in values.items():
            if name not in NEUTRAL:
                known = (
                    "model, prompt, max_tokens, n, seed, stop, stream, stream_options, temperature, top_k, top_p, user"
                )
                raise RequestError(400, f"{name[:50]!r}: no such setting; there are {known}")
            if value not in NEUTRAL[name]:
                raise RequestError(400, f"{name}: this server has nothing of the kind; leave it out")
        return cls(model, CompletionRequest(prompts, n, stop, options), stream, usage)


def _options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the search, taken out of the values, in place of all that a model's folder has for them. A
    temperature of 0 takes the likeliest tokens, of which no top_p and no seed makes others."""
    limit = _whole(values.pop("max_tokens", MAX_TOKENS), "max_tokens", 1)
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": secrets.randbelow(2**63)}
    drawn |= {name: values.pop(name) for name in drawn if name in values}
    greedy = drawn["temperature"] == 0 and not isinstance(drawn["temperature"], bool)
    options = {"max_new_tokens": limit, "beam": 1, "sample": True, **drawn}
    if not greedy:
        return options_of(options)
    options_of({**options, "temperature": 1.0})  # what is wrong with the others
    return options_of({**options, "sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0})


def _whole(value: Any, name: str, least: int, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
        raise RequestError(
            400, f"{name}: must be a whole number of at least {least}{f', at most {most}' if most else ''}"
        )
    return value


def _usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream or not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise RequestError(400, 'stream_options: only {"include_usage": true}, and with stream')
    return flag("include_usage", value.get("include_usage", False))


@dataclass(frozen=True)
class Completion:
    """The facts that all parts of one answer share."""

    model: str
    prompt_tokens: int
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, outputs: Sequence[Written]) -> dict[str, Any]:
        """Write an answer in one piece."""
        choices = [_choice(i, output.text, output.finish_reason) for i, output in enumerate(outputs)]
        return {**self._chunk(choices), "usage": self._usage(outputs)}

    def part(self, text: str, reason: str | None = None, *, wants_usage: bool) -> dict[str, Any]:
        """Write a piece of an answer; `reason`: why it ends there."""
        return {**self._chunk([_choice(0, text, reason)]), **({"usage": None} if wants_usage else {})}

    def last(self, output: Written) -> dict[str, Any]:
        """Write the counts behind the last piece."""
        return {**self._chunk([]), "usage": self._usage([output])}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": TYPE, "created": self.created, "model": self.model, "choices": choices}

    def _usage(self, outputs: Sequence[Written]) -> dict[str, int]:
        new = sum(output.tokens for output in outputs)
        total = self.prompt_tokens + new
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": new, "total_tokens": total}


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def model_entry(name: str, created: int) -> dict[str, Any]:
    """Describe a model, as /v1/models lists it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "mlx-transformer"}


def error_of(status: int, message: str, code: str | None) -> dict[str, Any]:
    """Write an error as clients read it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or ERRORS.get(status)}}
