"""Decoder-only models behind OpenAI's /v1/completions: fields of a request, decoding, the endpoint.

Unsupported fields are refused unless their value has no effect. chatting.py has the same for chats.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from threading import local
from typing import Any, ClassVar, Self

from mlx_transformer.core.inputs import check_ids
from mlx_transformer.decoding.running import NewToken, Prefixes, Running
from mlx_transformer.generation.settings import chosen_options, resolved
from mlx_transformer.generation.stream import check_stop, pieces, prompt_ids, until, write_tokens
from mlx_transformer.generation.translate import fitting_tokenizer

from .batching import streamed
from .calls import Call, event
from .models import NO_STREAM, Loaded, Row, Search, check_lengths
from .requests import (
    FLAG,
    TEXT,
    TEXTS,
    TEXTS_OR_IDS,
    Form,
    RequestError,
    check_count,
    flag,
    number,
    search_fields,
    search_options,
    texts,
    texts_or_ids,
    unknown_field,
    whole,
)

EXAMPLE = '{"model": "stories", "prompt": "Once upon a time", "max_tokens": 16}'
MAX_TOKENS = 16  # OpenAI's default
LARGEST_N = 64
MOST_LIKELIEST = 20
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
SETTINGS = "presence_penalty", "frequency_penalty", "repetition_penalty", "speculate"
IGNORED = ("user", "prompt_cache_key", "safety_identifier")
"""Fields that identify the caller; they change no answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {"logit_bias": ({},), "service_tier": ("auto", "default"), "store": (False,)}
"""{OpenAI's field without an effect here: values that are accepted}"""
LEGACY: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",)}
SEED = secrets.randbelow(2**63)
"""Seed of all requests without one, so that they share batches; their rows differ by their row numbers."""


# The form.
def asked_fields(limit: int | None) -> dict[str, Any]:
    """Schemas of the fields of completions and chats. limit: default of max_tokens; None: up to the last position."""
    search = search_fields()
    most = number(limit or 0, "Most new tokens.")
    return {
        "stop": TEXTS,
        "max_tokens": most if limit else {name: value for name, value in most.items() if name != "default"},
        "n": number(1, "Outputs per prompt.", most=LARGEST_N),
        **{name: search[name] for name in (*DRAWN, *SETTINGS)},
        "temperature": {**search["temperature"], "minimum": 0, "description": "0 takes the likeliest tokens."},
        "seed": {name: value for name, value in search["seed"].items() if name != "default"},
        "stream": {**FLAG, "default": False, "description": "Send pieces as server-sent events."},
        "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
        **dict.fromkeys(IGNORED, TEXT),
    }


LIKELIEST = number(0, "Log-probabilities of the tokens, and of so many of the likeliest.", least=0, most=MOST_LIKELIEST)
COMPLETE = Form(
    {
        "model": TEXT,
        "prompt": TEXTS_OR_IDS,
        **asked_fields(MAX_TOKENS),
        "logprobs": {name: value for name, value in LIKELIEST.items() if name != "default"},
    },
    ["model", "prompt"],
    EXAMPLE,
)


@dataclass(frozen=True)
class Asked:
    """The fields of a request besides its prompts.

    n: outputs per prompt. stop: an output ends before any of these words. options: settings of the search. limits:
    {field of the request: most new tokens}. likeliest: number of likeliest tokens to list with log-probabilities; None:
    no log-probabilities. seeded: the request has a seed. wants_usage: end a stream with the counts of tokens.
    """

    model: str
    n: int
    stop: list[str]
    options: dict[str, Any]
    limits: dict[str, int]
    seeded: bool
    stream: bool
    wants_usage: bool
    likeliest: int | None

    @classmethod
    def taken(cls, values: dict[str, Any], likeliest: int | None, limit: int | None = None) -> Self:
        """Remove these fields from `values`, checked. limit: default for the most new tokens."""
        model, stream = values.pop("model"), flag("stream", values.pop("stream", False))
        n, usage = whole("n", values.pop("n", 1), 1, LARGEST_N), _usage(values.pop("stream_options", None), stream)
        stop, seeded = texts("stop", values.pop("stop", [])), "seed" in values
        for name in IGNORED:
            if not isinstance(values.pop(name, ""), str):
                raise RequestError(400, f"{name}: must be a string")
        names = [name for name in ("max_completion_tokens", "max_tokens") if name in values]
        limits = {name: whole(name, values.pop(name), 1) for name in names}
        most = next(iter(limits.values()), limit)  # OpenAI's newer name wins
        options = _options(values, {} if most is None else {"max_new_tokens": most})
        return cls(model, n, stop, options, limits, seeded, stream, usage, likeliest)


def refuse_others(values: Mapping[str, Any], form: Form, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse the remaining fields, unless their value has no effect."""
    for name, value in values.items():
        if name not in neutral:
            raise unknown_field(name, form.fields)
        if value not in neutral[name]:
            raise RequestError(400, f"{name}: this server doesn't have it; leave it out")


def _options(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Remove the search's settings from `values` and add them to the model's own. Temperature 0 is greedy search, for
    which top_p etc. are ignored."""
    options |= {name: values.pop(name) for name in SETTINGS if name in values}
    drawn = {**DRAWN, "seed": SEED}
    drawn |= {name: values.pop(name) for name in drawn if name in values}
    options |= {"beam": 1, "sample": True, **drawn}
    if drawn["temperature"] != 0 or isinstance(drawn["temperature"], bool):
        return search_options(options)
    search_options({**options, "temperature": 1.0})  # checks the others
    return search_options({**options, "sample": False, **DRAWN})


def _usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream or not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise RequestError(400, 'stream_options: only {"include_usage": true}, and with stream')
    return flag("include_usage", value.get("include_usage", False))


@dataclass
class Written:
    """An output that is being written. tokens: number generated so far, at most `limit`; scored: the tokens, if the
    request wants log-probabilities."""

    limit: int
    text: str = ""
    tokens: int = 0
    scored: list[NewToken] = field(default_factory=list)
    stopped: bool = field(default=False, repr=False)

    @property
    def finish_reason(self) -> str:
        """As in OpenAI's API: "stop" for an end token or a stop word, "length" for the limit."""
        return "stop" if self.stopped or self.tokens < self.limit else "length"

    def follow(self, tokenizer: Any, ids: Iterable[int | None], stop: Sequence[str]) -> Iterator[str]:
        """Yield the text of the ids in pieces, up to a stop word."""
        decoded = 0

        def counted() -> Iterator[int | None]:
            for id in ids:
                self.tokens += id is not None
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

    def noted(self, tokens: Iterable[NewToken | None], scored: bool) -> Iterator[int | None]:
        """Yield the tokens' ids; store the tokens if `scored`."""
        for token in tokens:
            if scored and token is not None:
                self.scored.append(token)
            yield None if token is None else token.id


@dataclass(frozen=True)
class Completion:
    """Writes an answer: its fields are in every part. tokenizer: spells tokens with log-probabilities."""

    asked: Asked
    prompt_tokens: int
    tokenizer: Any
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    prefix: ClassVar[str] = "cmpl"
    kinds: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")
    """Names of a whole answer, and of a part."""

    def whole(self, outputs: Sequence[Written]) -> dict[str, Any]:
        """Write a whole answer."""
        return {**self._answer([self.choice(i, o) for i, o in enumerate(outputs)], 0), "usage": self._usage(outputs)}

    async def events(
        self, parts: AsyncIterator[tuple[int, str | None]], outputs: Sequence[Written]
    ) -> AsyncIterator[str]:
        """Write the events of a stream. parts: (number of the output, piece), with None after an output's last
        piece."""
        told, length = [0 for _ in outputs], [0 for _ in outputs]

        def part(i: int, text: str, reason: str | None = None) -> str:
            new = outputs[i].scored[told[i] :]
            choice = self.piece(i, text, self.log_probabilities(new, length[i]), reason)
            told[i] += len(new)
            length[i] += sum(len(self.spelling(token.id)) for token in new)
            return event({**self._answer([choice], 1), **({"usage": None} if self.asked.wants_usage else {})})

        for i in range(len(outputs)) if self.begins else ():
            yield part(i, "")
        async for i, text in parts:
            yield part(i, text or "", outputs[i].finish_reason if text is None else None)
        if self.asked.wants_usage:
            yield event({**self._answer([], 1), "usage": self._usage(outputs)})
        yield "data: [DONE]\n\n"

    begins: ClassVar[bool] = False
    """Whether a stream begins with a part of its own for each output."""

    def choice(self, index: int, output: Written) -> dict[str, Any]:
        """Write a whole output."""
        return self.piece(index, output.text, self.log_probabilities(output.scored, 0), output.finish_reason)

    def piece(self, index: int, text: str, log_probabilities: Any, reason: str | None) -> dict[str, Any]:
        """Write a part of an output; the last has a `reason`."""
        return {"index": index, "text": text, "logprobs": log_probabilities, "finish_reason": reason}

    def log_probabilities(self, tokens: Sequence[NewToken], place: int) -> Any:
        """Write the log-probabilities of tokens, whose text begins at `place`; None if nobody asked."""
        if self.asked.likeliest is None:
            return None
        spelled, top = [self.spelling(token.id) for token in tokens], []
        for spelling, token in zip(spelled, tokens, strict=True):
            top.append({self.spelling(id): log_p for id, log_p in reversed(token.likeliest)})
            top[-1][spelling] = token.log_p  # several ids may be spelled alike, e.g. parts of characters
        return {
            "tokens": spelled,
            "token_logprobs": [token.log_p for token in tokens],
            "top_logprobs": top,
            "text_offset": [place + sum(map(len, spelled[:i])) for i in range(len(spelled))],
        }

    def spelling(self, id: int) -> str:
        """Return the text that a token adds, or its name if it adds none."""
        decode, size = self.tokenizer.decode, self.tokenizer.vocab_size
        return decode([id, id])[len(decode([id])) :] or (self.tokenizer.token(id) if id < size else f"<{id}>")

    def _answer(self, choices: list[dict[str, Any]], kind: int) -> dict[str, Any]:
        about = {"id": f"{self.prefix}-{self.id}", "object": self.kinds[kind], "created": self.created}
        return {**about, "model": self.asked.model, "choices": choices}

    def _usage(self, outputs: Sequence[Written]) -> dict[str, int]:
        new = sum(output.tokens for output in outputs)
        total = self.prompt_tokens + new
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": new, "total_tokens": total}


# The model.
class CompletionModel(Loaded):
    """A loaded decoder. `UserError` without a fitting tokenizer."""

    label = "completion"
    use = "completes prompts; send them to /v1/completions, conversations to /v1/chat/completions"

    def __init__(self, *given: Any):
        super().__init__(*given)
        model = self.model
        self.tokenizer = fitting_tokenizer(model.config, model.tokenizer, self.name, "decoder", "completing")
        self.prefixes = Prefixes(model.config, self.settings.prefix_megabytes * 2**20)
        self._of_thread = local()

    def rows(self, prompts: Sequence[Any]) -> tuple[list[list[int]], int]:
        """Tokenize prompts, with a start token if the vocabulary uses one. Prompts may be ids; those for a published
        vocabulary get no start token. Also counts the tokens, without the start token of a vocabulary of ours."""
        makers = self.tokenizer.is_makers
        if isinstance(prompts[0], str):
            rows = [[*ids] for ids in prompt_ids(self.tokenizer, prompts)]
        else:
            start = [] if makers else [self.tokenizer.bos_id]
            rows = [[*start, *row.tolist()] for row in check_ids(prompts, self.model.config.vocab_size, "prompt")]
        return rows, sum(len(row) - (0 if makers else 1) for row in rows)

    def check(self, asked: Asked, prompts: int) -> None:
        """Refuse a request with too many outputs or tokens for this model."""
        check_lengths(asked.limits, self.model.config.max_positions)
        check_stop(asked.stop)
        check_count(f"prompt: {prompts * asked.n} outputs", prompts * asked.n, self.max_sentences)

    async def complete(self, asked: Asked, rows: Sequence[list[int]], client: Hashable) -> list[Written]:
        """Return `n` outputs for each row of ids, in order."""
        if self.model.has_steps:
            parts, outputs = await self.stream(asked, rows, client)
            async for _ in parts:
                pass
            return outputs
        if asked.likeliest is not None:
            raise RequestError(400, NO_STREAM)
        _, options = chosen_options(self.model.generation, asked.options)
        task = Search(self.model, self.name, options, scored=True)
        payloads = [Row(ids, place) for ids, place in self._places(asked, rows)]
        best = await self.compute(task, payloads, [len(row.ids) for row in payloads], client)
        written = await asyncio.to_thread(self._texts, [outputs[0].ids for outputs in best], asked)
        self._count(written)
        return written

    async def stream(
        self, asked: Asked, rows: Sequence[list[int]], client: Hashable
    ) -> tuple[AsyncIterator[tuple[int, str | None]], list[Written]]:
        """Decode `n` outputs for each row of ids; returns (number of the output, piece) as in `streamed`, and the
        outputs, complete after the last piece. All requests share a running batch per thread."""
        if not self.model.has_steps:
            raise RequestError(400, NO_STREAM)
        options, written = resolved(self.model.generation, asked.options), list[Written]()

        def begun(output: Written, ids: list[int], place: int) -> Iterator[str]:
            tokens = write_tokens(self.running, ids, row=place, likeliest=asked.likeliest, **options)
            with closing(tokens):
                new = output.noted(tokens, asked.likeliest is not None)
                for piece in output.follow(self.tokenizer, new, asked.stop):
                    yield piece if asked.stream else ""

        begins: list[Callable[[], Iterator[str]]] = []
        for ids, place in self._places(asked, rows):
            written.append(Written(asked.options["max_new_tokens"]))
            begins.append(partial(begun, written[-1], ids, place))
        lengths = [len(row) for row in rows for _ in range(asked.n)]
        done = partial(self._count, written)
        return await streamed(self.batcher, begins, lengths=lengths, size=1, client=client, done=done), written

    @property
    def running(self) -> Running:
        """The running batch of this thread."""
        if not hasattr(self._of_thread, "running"):
            rounded = self.model.depends_on_rounding
            with self.model.decoding() as model:
                # Joined rows are padded, which changes the last bits of logits, unless the model has `own_lengths`.
                apart = self.model.depends_on_batch if model.own_lengths else rounded
                self._of_thread.running = Running(model, prefixes=self.prefixes, apart=apart, whole_chunks=rounded)
        return self._of_thread.running

    def _places(self, asked: Asked, rows: Sequence[list[int]]) -> Iterator[tuple[list[int], int]]:
        """Yield each row `n` times, with the row number for its random draws."""
        first = 0 if asked.seeded else secrets.randbelow(2**30)
        for i, ids in enumerate(ids for ids in rows for _ in range(asked.n)):
            yield ids, first + i

    def _texts(self, outputs: list[list[int]], asked: Asked) -> list[Written]:
        limit = asked.options["max_new_tokens"]
        if not asked.stop:
            decoded = self.tokenizer.decode_batch(outputs)
            return [Written(limit, text, len(ids)) for text, ids in zip(decoded, outputs, strict=True)]
        written = [Written(limit) for _ in outputs]
        for output, ids in zip(written, outputs, strict=True):
            for _ in output.follow(self.tokenizer, ids, asked.stop):
                pass
        return written

    def _count(self, written: Sequence[Written]) -> None:
        self.count(len(written), sum(output.tokens for output in written))


# The endpoint.
async def complete(call: Call) -> Any:
    """Continue prompts, by a decoder-only model."""
    values = {name: value for name, value in (await call.values()).items() if value is not None}
    if not isinstance(values.get("model"), str) or "prompt" not in values:
        raise RequestError(400, f'body: "model" and "prompt" are needed; send {EXAMPLE}')
    prompts = texts_or_ids("prompt", values.pop("prompt"))
    likeliest = whole("logprobs", values.pop("logprobs"), 0, MOST_LIKELIEST) if "logprobs" in values else None
    asked = Asked.taken(values, likeliest, MAX_TOKENS)
    if values.pop("best_of", asked.n) != asked.n:
        raise RequestError(400, "best_of: all outputs are given; leave it out")
    refuse_others(values, COMPLETE, NEUTRAL | LEGACY)
    model = call.model(asked.model)
    model.check(asked, len(prompts))
    rows, tokens = await asyncio.to_thread(model.rows, prompts)
    return await answered(call, model, rows, Completion(asked, tokens, model.tokenizer))


async def answered(call: Call, model: CompletionModel, rows: Sequence[list[int]], answer: Completion) -> Any:
    """Continue the rows, and answer at once or as a stream."""
    if not answer.asked.stream:
        return answer.whole(await call.result(model.complete(answer.asked, rows, call.client)))
    parts, outputs = await call.result(model.stream(answer.asked, rows, call.client))
    return call.stream(parts, answer.events(parts, outputs))
