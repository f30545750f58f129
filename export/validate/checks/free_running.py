"""Free-running outputs of every runtime, and both sides of those that part from the reference's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from export.validate.cases import Case
from export.validate.engines.protocol import Engine
from export.validate.findings import Divergence, Tokens
from export.validate.reference import Reference
from export.validate.reference.search import beam_search, token_by_token
from mlx_transformer.core.checkpoint import Checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.tokenizer import Tokenizer

from .decoding import Judged, judge_beam, judge_greedy

T = TypeVar("T")
TokenText = Callable[[Sequence[int]], tuple[str, ...]]
"""Gives the words that the report prints for token ids."""

FAILED = "failed: "
"""Begins the message about a run that failed."""

BEAM = 4
SAMPLE = 1  # seed of the drawn tokens: every runtime gets the same noise
MOST_NEW_TOKENS = 20
MOST_SENTENCES = 8


def attempt(run: Callable[[], T]) -> tuple[T | None, str]:
    """Return (result, "") of a run, or (None, its error message): a runtime that fails is a mismatch like any other."""
    try:
        return run(), ""
    except Exception as error:  # each runtime has its own exceptions
        return None, f"{FAILED}{' '.join(str(error).split())[:300]}"


def most_positions(engines: Sequence[Engine], config: TransformerConfig) -> int:
    """Return the length that all engines take: graphs of fixed shape may take less than their model."""
    return min([config.max_positions, *(engine.capabilities.longest or config.max_positions for engine in engines)])


def token_text(checkpoint: Checkpoint) -> TokenText:
    """Return what gives the text of tokens where the checkpoint has a tokenizer, otherwise their ids."""
    if checkpoint.tokenizer_path is None:
        return lambda ids: tuple(map(str, ids))
    tokenizer = Tokenizer.load(checkpoint.tokenizer_path)
    return lambda ids: tuple(tokenizer.decode([token]) or str(token) for token in ids)


def free_running(
    reference: Reference,
    engines: Sequence[Engine],
    cases: Sequence[Case],
    limits: Mapping[str, float],
    words: TokenText,
) -> Iterator[Tokens]:
    """Search greedily, by beam and by sampling with every runtime, from the rows of the cases that have several."""
    c = reference.config
    if not c.has_decoder:
        return
    room = most_positions(engines, c)
    most = max(1, room // 2)
    sources = [row[:most] for case in reversed(cases) if len(case.ids) > 1 for row in case.rows()][:MOST_SENTENCES]
    longest = max(map(len, sources)) if c.architecture == "decoder" else 1
    limit = min(MOST_NEW_TOKENS, room - longest + 1)
    widest = min(BEAM, c.vocab_size)
    truth = beam_search(reference, sources, widest, limit)

    def reference_outputs(beam: int, drawn: int | None) -> list[list[int]]:
        """Return the reference's own outputs, without eos."""
        if beam == 1:
            return [ids for ids, _ in token_by_token(reference, sources, limit, drawn)]
        return [[token for token in s.finished[0][1].tokens if token != c.eos_id] for s in truth]

    for engine in engines:
        for name, beam, drawn in (("greedy", 1, None), ("sampling", 1, SAMPLE), (f"beam {widest}", widest, None)):
            hypotheses, why = attempt(
                lambda engine=engine, beam=beam, drawn=drawn: engine.search(sources, beam, limit, drawn)
            )
            outputs = [ids for ids, _ in hypotheses or []]
            if hypotheses is None:
                judged = [Judged(problem=why)]
            elif beam == 1:
                judged = judge_greedy(reference, sources, outputs, limit, limits[engine.name], drawn)
            else:
                judged = judge_beam(truth, hypotheses, limit, limits[engine.name], c.eos_id)
            parted = [i for i, j in enumerate(judged) if j.problem or j.tie] if hypotheses is not None else []
            expected = reference_outputs(beam, drawn) if parted else []
            yield Tokens(
                runtime=engine.name,
                search=name,
                sentences=len(outputs),
                tokens=sum(map(len, outputs)),
                ties=tuple(j.tie for j in judged if j.tie),
                problems=tuple(j.problem for j in judged if j.problem),
                partings=tuple(
                    Divergence(
                        i,
                        words(outputs[i]),
                        words(expected[i]),
                        judged[i].problem or judged[i].tie,
                        bool(judged[i].problem),
                    )
                    for i in parted
                ),
            )
