"""Decoder-only models behind OpenAI's /v1/completions: the form, the way from prompts to text, the endpoint.

Each field of a request is honoured, or refused unless its value changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_transformer.core.inputs import check_ids
from mlx_transformer.generation.settings import chosen_options
from mlx_transformer.generation.stream import check_stop, pieces, prompt_ids, until
from mlx_transformer.generation.translate import fitting_tokenizer

from .batching import streamed
from .calls import Call, event
from .models import Loaded, Row, Search, check_lengths
from .requests import RequestError, check_count, flag, search_options, texts, texts_or_ids, unknown_field, whole
from .schema import FLAG, TEXT, TEXTS, TEXTS_OR_IDS, Form, number, search_fields

EXAMPLE = '{"model": "stories", "prompt": "Once upon a time", "max_tokens": 16}'
MAX_TOKENS = 16  # OpenAI's default
LARGEST_N = 64
# OpenAI's fields without an effect here, and their values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (),
    "presence_penalty": (0,),
    "suffix": ("",),
}


# The form.
def _form() -> Form:
    search = search_fields()
    fields = {
        "model": TEXT,
        "prompt": TEXTS_OR_IDS,
        "stop": TEXTS,
        "max_tokens": number(MAX_TOKENS, "Most new tokens."),
        "n": number(1, "Outputs per prompt.", most=LARGEST_N),
        "temperature": {
            **search["temperature"],
            "minimum": 0,
            "description": "0 takes the likeliest tokens.",
        },
        **{name: search[name] for name in ("top_p", "top_k")},
        "seed": {name: value for name, value in search["seed"].items() if name != "default"},
        "stream": {**FLAG, "default": False, "description": "Send pieces as server-sent events."},
        "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
        "user": TEXT,
    }
    return Form(fields, ["model", "prompt"], EXAMPLE)


COMPLETE = _form()


@dataclass(frozen=True)
class CompletionRequest:
    """prompts: texts, or rows of ids without a start token, each continued `n` times. stop: words before which an
    output ends. options: settings of the search. wants_usage: a stream ends with its counts."""

    model: str
    prompts: list[str] | list[list[int]]
    n: int
    stop: list[str]
    options: dict[str, Any]
    stream: bool
    wants_usage: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> CompletionRequest:
        """Read the fields of a body; null means "not given"."""
        values = {name: value for name, value in values.items() if value is not None}
        model = values.pop("model", None)
        if not isinstance(model, str) or "prompt" not in values:
            raise RequestError(400, f'body: "model" and "prompt" are needed; send {EXAMPLE}')
        prompts = texts_or_ids("prompt", values.pop("prompt"))
        stream = flag("stream", values.pop("stream", False))
        n = whole("n", values.pop("n", 1), 1, LARGEST_N)
        if values.pop("best_of", n) != n:
            raise RequestError(400, "best_of: all outputs are given; leave it out")
        usage = _usage(values.pop("stream_options", None), stream)
        stop = texts("stop", values.pop("stop", []))
        if not isinstance(values.pop("user", ""), str):
            raise RequestError(400, "user: must be a string")
        options = _options(values)
        for name, value in values.items():
            if name not in NEUTRAL:
                raise unknown_field(name, COMPLETE.fields)
            if value not in NEUTRAL[name]:
                raise RequestError(400, f"{name}: this server doesn't have it; leave it out")
        return cls(model, prompts, n, stop, options, stream, usage)


def _options(values: dict[str, Any]) -> dict[str, Any]:
    """Take the search's settings out of the values; they replace those of the model's folder. Temperature 0 takes the
    most likely token, and ignores top_p and seed."""
    limit = whole("max_tokens", values.pop("max_tokens", MAX_TOKENS), 1)
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": secrets.randbelow(2**63)}
    drawn |= {name: values.pop(name) for name in drawn if name in values}
    greedy = drawn["temperature"] == 0 and not isinstance(drawn["temperature"], bool)
    options = {"max_new_tokens": limit, "beam": 1, "sample": True, **drawn}
    if not greedy:
        return search_options(options)
    search_options({**options, "temperature": 1.0})  # checks the others
    return search_options({**options, "sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0})


def _usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream or not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise RequestError(400, 'stream_options: only {"include_usage": true}, and with stream')
    return flag("include_usage", value.get("include_usage", False))


@dataclass
class Written:
    """An output while it is written. tokens: generated so far, at most `limit`."""

    limit: int
    text: str = ""
    tokens: int = 0
    stopped: bool = field(default=False, repr=False)

    @property
    def finish_reason(self) -> str:
        """OpenAI's word: "stop" at an end token or a stop word, "length" at the limit."""
        return "stop" if self.stopped or self.tokens < self.limit else "length"

    def follow(self, tokenizer: Any, ids: Iterable[int], stop: Sequence[str]) -> Iterator[str]:
        """Yield the text of the ids in pieces, up to a stop word."""
        decoded = 0

        def counted() -> Iterator[int]:
            for id in ids:
                self.tokens += 1
                yield id

        def measured() -> Iterator[str]:
            nonlocal decoded
            for piece in pieces(tokenizer, counted()):
                decoded += len(piece)
                yield piece

        for piece in until(measured(), stop):
            self.text += piece
            yield piece
        self.stopped = len(self.text) < decoded


@dataclass(frozen=True)
class Completion:
    """Shared by all parts of an answer."""

    model: str
    prompt_tokens: int
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, outputs: Sequence[Written]) -> dict[str, Any]:
        """Write a whole answer."""
        choices = [_choice(i, output.text, output.finish_reason) for i, output in enumerate(outputs)]
        return {**self._chunk(choices), "usage": self._usage(outputs)}

    def part(self, text: str, reason: str | None = None, *, wants_usage: bool) -> dict[str, Any]:
        """Write a piece of a stream; the last has a `reason`."""
        return {**self._chunk([_choice(0, text, reason)]), **({"usage": None} if wants_usage else {})}

    def last(self, output: Written) -> dict[str, Any]:
        """Write the counts, after the last piece."""
        return {**self._chunk([]), "usage": self._usage([output])}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _usage(self, outputs: Sequence[Written]) -> dict[str, int]:
        new = sum(output.tokens for output in outputs)
        total = self.prompt_tokens + new
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": new, "total_tokens": total}


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


# The model.
class CompletionModel(Loaded):
    """A loaded decoder. `UserError` without a fitting tokenizer."""

    label = "completion"
    use = "completes prompts; send them to /v1/completions"

    def __init__(self, *given: Any):
        super().__init__(*given)
        model = self.model
        self.tokenizer = fitting_tokenizer(model.config, model.tokenizer, self.name, "decoder", "completing")

    def prompt_tokens(self, prompts: Sequence[Any]) -> int:
        """Count the tokens of the prompts, without start tokens."""
        return sum(len(ids) - 1 for ids in self._ids(prompts))

    async def complete(self, request: CompletionRequest, client: Hashable) -> list[Written]:
        """Return `n` outputs for each prompt, in order."""
        rows = await self._rows(request)
        _, options = chosen_options(self.model.generation, request.options)
        task = Search(self.model, self.name, options, not self.model.has_steps)
        payloads = [Row(ids, i) for i, ids in enumerate(rows)]
        best = await self.compute(task, payloads, [len(ids) for ids in rows], client)
        written = await asyncio.to_thread(self._texts, [outputs[0].ids for outputs in best], request)
        self._count(written)
        return written

    async def stream(self, request: CompletionRequest, client: Hashable) -> tuple[AsyncIterator[str], Written]:
        """Return a single output in pieces; `Written` is complete after the last."""
        if len(request.prompts) * request.n != 1:
            raise RequestError(400, "stream: one prompt is streamed, with n=1; leave out stream for several")
        [row] = await self._rows(request)
        written = Written(request.options["max_new_tokens"])

        def begin() -> Iterator[str]:
            return written.follow(self.tokenizer, self.model.stream_ids(row, **request.options), request.stop)

        done = lambda: self._count([written])  # noqa: E731
        return await streamed(self.batcher, begin, length=len(row), size=1, client=client, done=done), written

    async def _rows(self, request: CompletionRequest) -> list[list[int]]:
        check_lengths({"max_tokens": request.options["max_new_tokens"]}, self.model.config.max_positions)
        check_stop(request.stop)
        count = len(request.prompts) * request.n
        check_count(f"prompt: {count} outputs", count, self.max_sentences)
        rows = await asyncio.to_thread(self._ids, request.prompts)
        return [ids for ids in rows for _ in range(request.n)]

    def _ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """The ids of each prompt, after a start token; of a published decoder's vocabulary, ids as they are."""
        if not prompts or isinstance(prompts[0], str):
            return [list(ids) for ids in prompt_ids(self.tokenizer, prompts)]
        checked = check_ids(prompts, self.model.config.vocab_size, "prompt")
        start = [] if self.tokenizer.is_makers else [self.tokenizer.bos_id]
        return [[*start, *row.tolist()] for row in checked]

    def _texts(self, outputs: list[list[int]], request: CompletionRequest) -> list[Written]:
        limit = request.options["max_new_tokens"]
        if not request.stop:
            decoded = self.tokenizer.decode_batch(outputs)
            return [Written(limit, text, len(ids)) for text, ids in zip(decoded, outputs, strict=True)]
        written = [Written(limit) for _ in outputs]
        for output, ids in zip(written, outputs, strict=True):
            for _ in output.follow(self.tokenizer, ids, request.stop):
                pass
        return written

    def _count(self, written: Sequence[Written]) -> None:
        self.count(len(written), sum(output.tokens for output in written))


# The endpoint.
async def complete(call: Call) -> Any:
    """Continue prompts, by a decoder-only model."""
    body = CompletionRequest.of(await call.values())
    model = call.model(body.model)
    completion = Completion(body.model, model.prompt_tokens(body.prompts))
    if not body.stream:
        return completion.whole(await call.result(model.complete(body, call.client)))
    pieces, written = await call.result(model.stream(body, call.client))
    return call.stream(pieces, _events(pieces, written, completion, body.wants_usage))


async def _events(
    pieces: AsyncIterator[str], written: Written, completion: Completion, wants_usage: bool
) -> AsyncIterator[str]:
    async for piece in pieces:
        yield event(completion.part(piece, wants_usage=wants_usage))
    yield event(completion.part("", written.finish_reason, wants_usage=wants_usage))
    if wants_usage:
        yield event(completion.last(written))
    yield "data: [DONE]\n\n"
