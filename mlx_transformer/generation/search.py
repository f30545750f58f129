"""One search for every runtime: check the request, sort and batch the inputs, run, restore the order.

ids -> checked -> sorted by length -> batches within a token budget -> Greedy or Beam over steps.run -> hypotheses
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
from .options import (
    Hypothesis,
    Options,
    check_options,
    check_prefix,
    check_single,
    expected_tokens,
    length_limits,
)
from .steps import Batch, Model, Strategy, run

DoneShare = Callable[[float], None]
T = TypeVar("T")


def reported(batches: Iterable[T], size: Callable[[T], int], total: int, done: DoneShare | None) -> Iterator[T]:
    """Yield the batches; `done` is told the share of `total` inputs that is finished whenever the next one is asked
    for."""
    finished = 0
    for batch in batches:
        yield batch
        finished += size(batch)
        if done is not None:
            done(finished / total)


@dataclass(frozen=True, kw_only=True)
class SharedSearch:
    """How one search serves several callers: the place of each input, and when to stop.

    row_numbers: what the drawn tokens of each input depend on, by default its place in the list; so inputs of different
    lists may be searched together. stopped: asked between steps; once it is true, `search` raises `Stopped`.
    """

    row_numbers: Sequence[int] | None = None
    stopped: Callable[[], bool] = lambda: False


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
    """Return the best output of each input: new token ids without start token and closing eos. Arguments as for
    `search`, whose `n_best` is refused."""
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
    """Return the `n_best` best outputs of each input, best first, in the order of the inputs.

    ids: source ids of each sentence, eos included (decoder-only: prompts, as they should be continued), of any lengths.
    prefix: forced first tokens of each output, [] for none; they are part of the output and of its score.
    candidates: the ids that each output may be made of, as a shortlist names them, beside ends and forced ones: others
    are not chosen, nor in what probabilities are normalised by; default: all ids. done: told the share of the inputs
    that is finished, batch by batch. share: for a server's batches. options: the fields of `Options`, and other inputs
    of the model (`core/inputs.py`): inputs_embeds in place of ids, for each input vectors (S, d_model) of any lengths,
    where rows of the embedding are once they are multiplied by sqrt(d_model): the patches of a picture, say. Raises
    `UserError` for ids outside the vocabulary, empty rows, rows longer than the model takes, and options that
    contradict each other.
    """
    return _search(model, *_parted(ids, options), (prefix, candidates), share, done, True)


def _parted(ids: Ids | None, options: dict[str, Any]) -> tuple[dict[str, Any], Options]:
    """Return what the model reads, by argument, and how it searches."""
    others = {entry.argument for entry in INPUTS.values()} - {"ids"}
    inputs = {name: value for name, value in options.items() if name in others}
    chosen = Options.of({name: value for name, value in options.items() if name not in others})
    return {"ids": ids, **inputs}, chosen


def checked(
    model: Model, inputs: dict[str, Any], prefix: Ids | None, chosen: Options
) -> tuple[Sources, list[np.ndarray], np.ndarray]:
    """Return Sources, forced first tokens and most new tokens of each input; `UserError` as `search` says. inputs: what
    `Sources.of` takes."""
    config = model.config
    if not config.has_decoder:
        raise UserError("an encoder alone generates nothing: use its logits, or a model with a decoder")
    check_options(chosen, config)
    sources = Sources.of(config, **inputs)
    if chosen.start_id is not None:
        sources.start = chosen.start_id
    forced = check_prefix(prefix, len(sources), config, chosen.end_ids)
    limits = length_limits(sources, forced, chosen, config, not model.extends_positions)
    check_fits(config, chosen.beam, int(sources.lengths.max(initial=0)), int(limits.max(initial=0)))
    return sources, forced, limits


def check_fits(c: TransformerConfig, beam: int, source: int, target: int) -> None:
    """Raise `UserError` if the machine has not even the memory for one sentence: its caches, twice while hypotheses
    change places, and the logits of a step."""
    position = 4 * sum(layer.key_value_heads * (layer.d_k + layer.d_v) for layer in c.layers("decoder"))
    needed = position * (source + 2 * beam * target) + 8 * beam * c.vocab_size
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
    """outputs: what they begin with, and what they may be made of."""
    config, (prefix, listed) = model.config, outputs
    sources, forced, limits = checked(model, inputs, prefix, chosen)
    candidates = None if listed is None else check_candidates(listed, len(sources), config)
    places = np.arange(len(sources)) if share.row_numbers is None else np.asarray(share.row_numbers, int)
    results: list[list[Hypothesis]] = [[] for _ in sources]
    shared = None if model.extends_positions or config.has_encoder else config.max_positions
    lengths = sources.lengths
    expected = expected_tokens(lengths, limits, chosen, forced) if config.has_encoder else limits
    indices = batches(lengths, expected, limits, chosen, shared)
    work = [
        Batch(
            *(i, sources[i], [forced[j] for j in i], limits[i], places[i]),
            None if candidates is None else [candidates[j] for j in i],
        )
        for i in indices
    ]
    searched = run_all(model, work, chosen, scored, share.stopped)
    for batch, hypotheses in reported(searched, lambda pair: len(pair[0].index), len(results), done):
        for i, best in zip(batch.index, hypotheses, strict=True):
            results[i] = best
    for i, hypotheses in enumerate(results):
        if not hypotheses and candidates is not None:
            raise UserError(f"source row {i}: none of its candidates may be written; give it more, or fewer rules")
        if not hypotheses or not np.isfinite(hypotheses[0].score):
            raise UserError(f"source row {i}: the model's logits are not finite; check its weights")
    return results


def run_all(
    model: Model, work: Sequence[Batch], options: Options, scored: bool, stopped: Callable[[], bool]
) -> Iterable[tuple[Batch, list[list[Hypothesis]]]]:
    """Search each batch, in any order; several at the same time on a model that can."""

    def search_on(model: Model, batch: Batch) -> tuple[Batch, list[list[Hypothesis]]]:
        if batch.candidates is None:
            return batch, run(model, batch, strategy_of(model, batch, options, scored), stopped)
        candidates = Candidates.of(batch, options, model.config)
        narrowed, (own, chosen) = among(model, candidates), candidates.narrowed(batch, options)
        return batch, candidates.restored(run(narrowed, own, strategy_of(narrowed, own, chosen, scored), stopped))

    return model.in_parallel(search_on, work)


def strategy_of(model: Model, batch: Batch, options: Options, scored: bool) -> Strategy:
    """Return the model's own strategy for this batch, or else `Beam` or `Greedy`."""
    own = model.strategy(batch, options, scored)
    if own is not None:
        return own
    arguments = model.arrays, batch, options, model.config
    return Beam(*arguments) if options.beam > 1 else Greedy(*arguments, scored)


def batches(
    lengths: np.ndarray, expected: np.ndarray, limits: np.ndarray, options: Options, positions: int | None = None
) -> Iterator[np.ndarray]:
    """Yield indices of the inputs that are decoded together: neighbours in length, the longest first.

    A batch holds at most `batch_tokens` positions of cache if its outputs are as long as `expected`, and at least one
    input. positions: most positions of the padded prompt and its continuation, should that reach its limit
    (decoder-only models with a position table).
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
            if end > begin and (too_large or too_long):
                break
            end += 1
        yield order[begin:end]
        begin = end
