"""One search for every runtime: check the request, sort and batch the inputs, run, restore the order.

ids -> checked -> sorted by length -> batches within a token budget -> hypotheses, in the order of the ids

A batch is searched step by step (`Greedy` or `Beam` in `steps.run`), or at once by a graph with the search inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import INPUTS, Ids, Sources
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.machine import check_memory

from .beam import Beam
from .candidates import Candidates, among, check_candidates
from .greedy import Greedy
from .options import Hypothesis, Options, check_options, check_prefix, check_single, expected_tokens, length_limits
from .running import position_bytes
from .speculation import Speculated, check_speculation
from .steps import Batch, Model, Strategy, run

DoneShare = Callable[[float], None]
T = TypeVar("T")


def reported(batches: Iterable[T], size: Callable[[T], int], total: int, done: DoneShare | None) -> Iterator[T]:
    """Yield the batches; after each, call `done` with the finished share of the `total` inputs."""
    finished = 0
    for batch in batches:
        yield batch
        finished += size(batch)
        if done is not None:
            done(finished / total)


def never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class SharedSearch:
    """Settings of a search that serves several callers at once, e.g. in a server.

    row_numbers: the row number of each input in its caller's list, on which its random draws depend; default: its place
    in this search. stopped: called between steps; once it returns True, `search` raises `Stopped`.
    """

    row_numbers: Sequence[int] | None = None
    stopped: Callable[[], bool] = never

    def places(self, count: int) -> np.ndarray:
        return np.arange(count) if self.row_numbers is None else np.asarray(self.row_numbers, np.int64)


UNSHARED = SharedSearch()


def generate(
    model: Model,
    ids: Ids | None = None,
    prefix: Ids | None = None,
    *,
    candidates: Ids | None = None,
    done: DoneShare | None = None,
    share: SharedSearch = UNSHARED,
    **options: Any,
) -> list[list[int]]:
    """The best output of each input: new token ids without start token and final eos.

    Arguments as for `search`, except `n_best`, which must be 1.
    """
    check_single(options, "generate", "search")
    best = _search(model, *_parted(ids, options), (prefix, candidates), share, done, False)
    return [hypotheses[0].ids for hypotheses in best]


def search(
    model: Model,
    ids: Ids | None = None,
    prefix: Ids | None = None,
    *,
    candidates: Ids | None = None,
    done: DoneShare | None = None,
    share: SharedSearch = UNSHARED,
    **options: Any,
) -> list[list[Hypothesis]]:
    """The `n_best` best outputs of each input, best first, in the order of the inputs.

    ids: source ids of each sentence including eos (decoder-only: prompts to continue), of any lengths.
    prefix: forced first tokens of each output, [] for none; they are part of the output and count in its score.
    candidates: the ids that each output may contain, e.g. a shortlist's, in addition to end and forced tokens; the
    softmax runs over these ids only. Default: all ids.
    done: called after each batch with the finished share of the inputs, e.g. 0.5. share: for a server.
    options: the fields of `Options`, and other inputs of the model (`core/inputs.py`), e.g. inputs_embeds in place of
    ids: for each input vectors (S, d_model), on the scale of embedding rows multiplied by sqrt(d_model).
    Raises `UserError` for ids outside the vocabulary, empty rows, rows longer than the model takes, and options that
    contradict each other.
    """
    return _search(model, *_parted(ids, options), (prefix, candidates), share, done, True)


def _parted(ids: Ids | None, options: dict[str, Any]) -> tuple[dict[str, Any], Options]:
    """Split keyword arguments into the model's inputs and the options of the search."""
    others = {entry.argument for entry in INPUTS.values()} - {"ids"}
    inputs = {name: value for name, value in options.items() if name in others}
    chosen = Options.of({name: value for name, value in options.items() if name not in others})
    return {"ids": ids, **inputs}, chosen


def checked(
    model: Model, inputs: dict[str, Any], prefix: Ids | None, chosen: Options, narrowed: bool = False
) -> tuple[Sources, list[np.ndarray], np.ndarray]:
    """Check a request; return its sources, the forced first tokens of each output, and the most new tokens (N,).

    inputs: the arguments of `Sources.of`. narrowed: whether outputs have candidates. Raises `UserError` as `search`
    does.
    """
    config = model.config
    if not config.has_decoder:
        raise UserError("an encoder-only model can't generate: use its logits, or a model with a decoder")
    check_options(chosen, config)
    if chosen.speculate:
        check_speculation(model, chosen, narrowed)
    sources = Sources.of(config, **inputs)
    if chosen.start_id is not None:
        sources.start = chosen.start_id
    forced = check_prefix(prefix, len(sources), config, chosen.end_ids)
    limits = length_limits(sources, forced, chosen, config, not model.extends_positions)
    check_fits(config, chosen.beam, int(sources.lengths.max(initial=0)), int(limits.max(initial=0)))
    return sources, forced, limits


def check_fits(c: TransformerConfig, beam: int, source: int, target: int) -> None:
    """Raise `UserError` if memory is too small for a single sentence: its caches (twice, since reordering hypotheses
    copies them), and the logits of a step."""
    needed = position_bytes(c) * (source + 2 * beam * target) + 8 * beam * c.vocab_size
    check_memory(needed, f"decoding {target} tokens", "lower {beam} or {max_new_tokens}", beam=beam)


def _search(
    model: Model,
    inputs: dict[str, Any],
    chosen: Options,
    outputs: tuple[Ids | None, Ids | None],
    share: SharedSearch,
    done: DoneShare | None,
    scored: bool,
) -> list[list[Hypothesis]]:
    """outputs: the arguments (prefix, candidates). scored: see `Greedy`."""
    config, (prefix, listed) = model.config, outputs
    sources, forced, limits = checked(model, inputs, prefix, chosen, listed is not None)
    candidates = None if listed is None else check_candidates(listed, len(sources), config)
    places, lengths = share.places(len(sources)), sources.lengths
    positions = None if model.extends_positions or config.has_encoder else config.max_positions
    expected = expected_tokens(lengths, limits, chosen, forced) if config.has_encoder else limits
    work = [
        Batch(
            *(i, sources[i], [forced[j] for j in i], limits[i], places[i]),
            None if candidates is None else [candidates[j] for j in i],
        )
        for i in batches(lengths, expected, limits, chosen, positions)
    ]
    searched = run_all(model, work, chosen, scored, share.stopped)
    return in_order(searched, len(sources), done, "source row {}".format, listed is not None)


def in_order(
    searched: Iterable[tuple[np.ndarray, Sequence[list[Any]]]],
    total: int,
    done: DoneShare | None,
    name: Callable[[int], str],
    narrowed: bool = False,
) -> list[list[Any]]:
    """Collect the n-best outputs of all batches, in the order of the inputs.

    searched: for each batch, the indices of its inputs and their outputs. name: the name of input i in errors, e.g.
    "source row 3". narrowed: whether the search had candidates.
    Raises `UserError` if the best output of an input has no finite score.
    """
    results: list[list[Any]] = [[] for _ in range(total)]
    for index, outputs in reported(searched, lambda pair: len(pair[0]), total, done):
        for i, best in zip(index, outputs, strict=True):
            results[i] = best
    for i, best in enumerate(results):
        if not best and narrowed:
            raise UserError(f"{name(i)}: the rules ban all its candidates; give more candidates or fewer rules")
        if not best or not np.isfinite(best[0].score):
            raise UserError(f"{name(i)}: the model's logits are not finite; check its weights")
    return results


def run_all(
    model: Model, work: Sequence[Batch], options: Options, scored: bool, stopped: Callable[[], bool]
) -> Iterable[tuple[np.ndarray, list[list[Hypothesis]]]]:
    """Search all batches, in any order and in parallel if the model can; yield (indices of inputs, their outputs)."""
    if (whole := model.batch_search(options, stopped)) is not None:
        return ((batch.index, whole(batch)) for batch in work)

    def search_on(model: Model, batch: Batch) -> tuple[np.ndarray, list[list[Hypothesis]]]:
        if options.speculate:
            model = Speculated(model, batch, options)
        if batch.candidates is None:
            return batch.index, run(model, batch, strategy_of(model, batch, options, scored), stopped)
        candidates = Candidates.of(batch, options, model.config)
        narrowed, (own, chosen) = among(model, candidates), candidates.narrowed(batch, options)
        best = run(narrowed, own, strategy_of(narrowed, own, chosen, scored), stopped)
        return batch.index, candidates.restored(best)

    return model.in_parallel(search_on, work)


def strategy_of(model: Model, batch: Batch, options: Options, scored: bool) -> Strategy:
    """The model's own strategy for this batch, else `Beam` or `Greedy`."""
    own = model.strategy(batch, options, scored)
    if own is not None:
        return own
    arguments = model.arrays, batch, options, model.config
    return Beam(*arguments) if options.beam > 1 else Greedy(*arguments, scored)


def batches(
    lengths: np.ndarray, expected: np.ndarray, limits: np.ndarray, options: Options, positions: int | None = None
) -> Iterator[np.ndarray]:
    """Yield the indices of each batch's inputs: inputs of similar length together, the longest first.

    A batch holds at least one input, and at most `batch_tokens` cache positions if its outputs are as long as
    `expected`. positions: most positions of the padded prompt and the longest continuation; for decoder-only models
    with a position table.
    """
    order = np.lexsort((limits, lengths))[::-1]
    begin = 0
    while begin < len(order):
        longest, usual, limit = int(lengths[order[begin]]), 0, 0
        end = begin
        while end < len(order):
            usual, limit = max(usual, int(expected[order[end]])), max(limit, int(limits[order[end]]))
            too_large = (end - begin + 1) * options.beam * (longest + usual) > options.batch_tokens
            too_long = positions is not None and longest + limit - 1 > positions
            if end > begin and (too_large or too_long or options.speculate):
                break
            end += 1
        yield order[begin:end]
        begin = end
