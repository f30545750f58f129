"""Continue a prompt with a decoder-only model.

prompt -> start token and token ids -> search -> new ids -> text up to the first stop word
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mlx_transformer.core.inputs import Ids
from mlx_transformer.decoding.options import check_single
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .stream import pieces
from .translate import as_lines


def complete(
    tokenizer: Tokenizer,
    generate: Callable[..., list[list[int]]],
    prompts: str | Sequence[str],
    *,
    stop: Sequence[str] = (),
    **options: Any,
) -> list[str]:
    """Return the continuation of each prompt (a prompt may be empty), cut before the first of the words in `stop`.

    generate: (ids, **options) -> new ids of each row. options: the fields of `Options`. Raises `UserError` for a prompt
    that leaves no room in the model, and for wrong options.
    """
    check_single(options, "complete", "search")
    check_stop(stop)
    outputs = generate(prompt_ids(tokenizer, prompts), **options)
    return ["".join(until([text], stop)) for text in tokenizer.decode_batch(outputs)]


def stream(
    tokenizer: Tokenizer, stream_ids: Callable[..., Iterator[int]], prompt: str, stop: Sequence[str], **options: Any
) -> Iterator[str]:
    """Yield the continuation of one prompt in pieces while it is decoded, greedily or sampled.

    stream_ids: (ids, **options) -> iterator of new ids.
    """
    check_stop(stop)
    new = stream_ids(prompt_ids(tokenizer, [prompt])[0], **options)
    return until(pieces(tokenizer.decode, new), stop)


def prompt_ids(tokenizer: Tokenizer, prompts: str | Sequence[str]) -> Ids:
    """Return the rows of ids to continue: the start token, then the prompt's tokens without the end token."""
    return [[tokenizer.bos_id, *ids[:-1]] for ids in tokenizer.encode_batch(as_lines(prompts))]


def until(texts: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """Yield the texts up to the first stop word, without it. A piece that may begin a stop word is held back."""
    waiting = ""
    for text in texts:
        waiting += text
        ends = [place for word in stop if (place := waiting.find(word)) >= 0]
        if ends:
            if min(ends):
                yield waiting[: min(ends)]
            return
        possible = max((n for word in stop for n in range(1, len(word)) if waiting.endswith(word[:n])), default=0)
        if ready := waiting[: len(waiting) - possible]:
            yield ready
        waiting = waiting[len(waiting) - possible :]
    if waiting:
        yield waiting


def check_stop(stop: Sequence[str]) -> None:
    """Raise `UserError` unless `stop` is a list of non-empty strings."""
    if isinstance(stop, str) or not all(isinstance(word, str) and word for word in stop):
        raise UserError("stop: give a list of words, none of them empty")
