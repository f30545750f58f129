"""Stream one output while it is being decoded, by greedy search or sampling, token by token or as text.

Beam search can't stream: only its end decides which hypothesis wins.

`complete` continues a prompt with a decoder-only model:

    prompt -> start token and token ids -> search -> new ids -> text up to the first stop word
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mlx_transformer.core.inputs import Ids
from mlx_transformer.decoding.candidates import Candidates, among, check_candidates
from mlx_transformer.decoding.greedy import Greedy
from mlx_transformer.decoding.options import Options, check_single
from mlx_transformer.decoding.running import NewToken, Running
from mlx_transformer.decoding.search import checked
from mlx_transformer.decoding.speculation import Speculated
from mlx_transformer.decoding.steps import Batch, Model
from mlx_transformer.system.errors import Name, UserError
from mlx_transformer.text.tokenizer import Tokenizer

from .translate import Overlong, Translator, as_lines

REPLACEMENT = "\ufffd"  # a tokenizer decodes an incomplete character to this
LONGEST_CHARACTER, FEW = 4, 12  # bytes of a character; so many ids without any are no character's


def stream_ids(
    model: Model,
    ids: Sequence[int],
    prefix: Sequence[int] = (),
    *,
    row: int = 0,
    candidates: Sequence[int] | None = None,
    **options: Any,
) -> Iterator[int]:
    """Return an iterator over the new ids of an input, each as soon as it is decided; all together they are the
    output of `generate`. Arguments as for `stream_tokens`."""
    return (token.id for token in stream_tokens(model, ids, prefix, row=row, candidates=candidates, **options))


def stream_tokens(
    model: Model,
    ids: Sequence[int],
    prefix: Sequence[int] = (),
    *,
    row: int = 0,
    candidates: Sequence[int] | None = None,
    likeliest: int | None = None,
    **options: Any,
) -> Iterator[NewToken]:
    """Return an iterator over the new tokens of an input, as `stream_ids` over their ids.

    ids, prefix, candidates, options: as for `search`, for one input. row: the input's index in a list, which seeds its
    random draws. likeliest: tokens have log-probabilities, and so many of the likeliest with theirs; unset: neither.
    Wrong input and options raise `UserError` at the call, not at the first token.
    """
    tokens = write_tokens(Running(model), ids, prefix, row=row, candidates=candidates, likeliest=likeliest, **options)
    return filter(None, tokens)


def write_tokens(
    running: Running,
    ids: Sequence[int],
    prefix: Sequence[int] = (),
    *,
    row: int = 0,
    candidates: Sequence[int] | None = None,
    likeliest: int | None = None,
    **options: Any,
) -> Generator[NewToken | None]:
    """Return an iterator over the new tokens of an input in a running batch, with None as long as there is nothing
    yet. Arguments and errors as for `stream_tokens`. An input with candidates or guesses takes its steps by itself."""
    model, chosen = running.model, Options.of(options)
    if chosen.beam > 1:
        raise UserError(
            "{beam} has no token that is sure before the end: stream with {}", Name("beam", "1"), beam=chosen.beam
        )
    sources, forced, limits = checked(model, {"ids": [ids]}, [prefix], chosen, candidates is not None)
    listed = None if candidates is None else check_candidates([candidates], 1, model.config)
    batch = Batch(np.zeros(1, int), sources, forced, limits, np.array([row]), listed)
    if chosen.speculate:
        running = Running(Speculated(model, batch, chosen), chunk=running.chunk)  # guesses are of one text
    if listed is None:
        return running.write(batch, Greedy(model.arrays, batch, chosen, model.config, scored=False), likeliest)
    # Greedy on logits of the candidates only; works with any model.
    own = Candidates.of(batch, chosen, model.config)
    narrowed, (batch, chosen) = among(model, own), own.narrowed(batch, chosen)
    strategy = Greedy(model.arrays, batch, chosen, own.config, scored=False)
    return Running(narrowed).write(batch, strategy, likeliest, own.ids)


def stream(
    model: Model,
    translator: Translator,
    line: str,
    *,
    overlong: Overlong = "error",
    line_number: int = 1,
    on_overlong: Callable[[int], None] | None = None,
    around: Callable[[Sequence[int]], Sequence[int]] = list,
    candidates_of: Callable[[Sequence[int]], Sequence[int] | None] = lambda ids: None,
    **options: Any,
) -> Iterator[str]:
    """Return an iterator over the translation of a line; the pieces join to the text of
    `translator.translate([line])`.

    Pieces hold whole characters: a token that is part of one waits for the next. around: adds language tokens to the
    source ids. candidates_of: source ids -> ids that the output may contain. line_number: for messages. on_overlong:
    called with the number if the line is too long. Errors are raised at the call, as in `stream_ids`.
    """
    _, rows = translator.rows([line], overlong, line_number, on_overlong)
    # `stream_ids` checks its input at the call, so all parts are checked before the first starts.
    rows = [around(ids) for ids in rows]
    parts = [stream_ids(model, x, row=i, candidates=candidates_of(x), **options) for i, x in enumerate(rows)]
    texts = [pieces(translator.tokenizer, part) for part in parts]
    return filter(None, chain.from_iterable(chain([" "], text) if i else text for i, text in enumerate(texts)))


def pieces(tokenizer: Tokenizer, ids: Iterable[int | None]) -> Iterator[str]:
    """Yield the text of a growing list of ids, a piece for each id; joined, they are the text that all ids are decoded
    to. A piece is empty while a character is incomplete, and for None, which stands for no id yet."""
    return (_parts if tokenizer.decodes_in_parts else _decoded_anew)(tokenizer, ids)


def _parts(tokenizer: Tokenizer, ids: Iterable[int | None]) -> Iterator[str]:
    """Decode each id once or a few times, in linear time: behind the last id before it, after which a space counts."""
    before: list[int] = []
    waiting: list[int] = []

    def text(new: list[int]) -> str:
        return tokenizer.decode([*before, *new])[len(tokenizer.decode(before)) :]

    for id in ids:
        if id is None or not tokenizer.stands_for_text(id):
            yield ""
            continue
        waiting.append(id)
        if id in tokenizer.byte_ids:  # an invalid byte would change the text of the whole run
            yield ""
            continue
        new, settled = text(waiting), len(waiting)
        if new.endswith(REPLACEMENT) and not tokenizer.byte_ids:  # the next token may complete the character
            settled = len(waiting) - LONGEST_CHARACTER
            if settled < FEW or text(waiting[:settled]) + tokenizer.decode(waiting[settled:]) != new:
                yield ""
                continue
            new = text(waiting[:settled])
        yield new
        before, waiting = waiting[settled - 1 : settled], waiting[settled:]
    if waiting and (new := text(waiting)):
        yield new


def _decoded_anew(tokenizer: Tokenizer, ids: Iterable[int | None]) -> Iterator[str]:
    """Decode everything again for each id, where all text depends on all ids. For sentences this is a small part of a
    decoder's step."""
    so_far: list[int] = []
    emitted, text = 0, ""
    for id in ids:
        if id is None:
            yield ""
            continue
        so_far.append(id)
        text = tokenizer.decode(so_far)
        complete = max(emitted, len(text.rstrip(REPLACEMENT)))  # the next token may complete the character
        yield text[emitted:complete]
        emitted = complete
    if emitted < len(text):
        yield text[emitted:]


def complete(
    tokenizer: Tokenizer,
    generate: Callable[..., list[list[int]]],
    prompts: str | Sequence[str],
    *,
    stop: Sequence[str] = (),
    control_tokens: bool = False,
    **options: Any,
) -> list[str]:
    """Return the continuation of each prompt (a prompt may be empty), cut before the first of the words in `stop`.

    generate: (ids, **options) -> new ids of each row. control_tokens: a prompt's spellings of control tokens, e.g.
    <|im_start|>, are the tokens, not text. options: the fields of `Options`. Raises `UserError` for a prompt that
    leaves no room in the model, and for wrong options.
    """
    check_single(options, "complete", "search")
    check_stop(stop)
    return ended(tokenizer, generate(prompt_ids(tokenizer, prompts, control_tokens), **options), stop)


def ended(tokenizer: Tokenizer, outputs: Ids, stop: Sequence[str]) -> list[str]:
    """Return the texts of new ids, each up to the first stop word."""
    check_stop(stop)
    return ["".join(until([text], stop)) for text in tokenizer.decode_batch(outputs)]


def stream_completion(
    tokenizer: Tokenizer,
    stream_ids: Callable[..., Iterator[int]],
    prompt: str,
    stop: Sequence[str],
    control_tokens: bool = False,
    **options: Any,
) -> Iterator[str]:
    """Yield the continuation of a prompt in pieces while it is decoded, greedily or sampled.

    stream_ids: (ids, **options) -> iterator of new ids.
    """
    check_stop(stop)
    return stream_answer(tokenizer, stream_ids(prompt_ids(tokenizer, [prompt], control_tokens)[0], **options), stop)


def stream_answer(tokenizer: Tokenizer, new: Iterator[int], stop: Sequence[str]) -> Iterator[str]:
    """Yield the text of new ids in pieces, up to the first stop word."""
    check_stop(stop)
    return filter(None, until(pieces(tokenizer, new), stop))


def prompt_ids(tokenizer: Tokenizer, prompts: str | Sequence[str], control: bool = False) -> Ids:
    """Return the rows of ids to continue (`Tokenizer.prompts`)."""
    return tokenizer.prompts(as_lines(prompts), control)


def until(texts: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """Yield the texts up to the first stop word, without it. A piece that may begin a stop word is held back, and an
    empty piece stands in its place."""
    waiting = ""
    for text in texts:
        waiting += text
        ends = [place for word in stop if (place := waiting.find(word)) >= 0]
        if ends:
            if min(ends):
                yield waiting[: min(ends)]
            return
        possible = max((n for word in stop for n in range(1, len(word)) if waiting.endswith(word[:n])), default=0)
        yield waiting[: len(waiting) - possible]
        waiting = waiting[len(waiting) - possible :]
    if waiting:
        yield waiting


def check_stop(stop: Sequence[str]) -> None:
    """Raise `UserError` unless `stop` is a list of non-empty strings."""
    if isinstance(stop, str) or not all(isinstance(word, str) for word in stop):
        raise UserError("stop: give a list of words")
    if "" in stop:
        raise UserError("stop: an empty word ends no text; leave it out")
