"""The options of a search and its hypotheses; the checks of options, prefixes and lengths for all runtimes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mlx_transformer.system.errors import Name, Text, UserError, joined
from mlx_transformer.system.fields import ADVANCED, Bounds, check_fields, unknown_keys

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mlx_transformer.core.config import TransformerConfig
    from mlx_transformer.core.inputs import Ids

EXTRA_TOKENS = 50  # maximum output length: source length + 50 (Vaswani et al. 2017, section 6.1)

EXTENDED = 4  # times max_positions: most new tokens if positions are computed, not read from a table
LONGEST = 2**20
"""Largest number of tokens in an option, and largest id: more than any output or vocabulary has."""

PenaltyForm = Literal["gnmt", "length"]
PENALTY_OFFSETS: dict[str, float] = {"gnmt": 5.0, "length": 0.0}  # k of lp(n) = ((k + n) / (k + 1))^alpha

IdTuple = tuple[int, ...]
ID_FIELDS = ("forced_first", "suppressed", "suppressed_first", "end_ids")
"""The fields of `Options` with tuples of ids."""


@dataclass(frozen=True)
class Hypothesis:
    """One output: ids without start token and final eos; score = log p / lp(length), where length counts eos."""

    ids: list[int]
    score: float
    attention: NDArray[np.float32] | None = field(default=None, compare=False, repr=False, kw_only=True)
    """Attention (T, S) from each output token to the source tokens, if the search was asked for it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a search; the string under a field is its help on the command line."""

    beam: Annotated[int, Bounds(at_least=1, at_most=256)] = 1
    """Hypotheses kept per sentence; 1 is greedy search: always the likeliest token, on ties the lowest id."""
    # n^10 fits into float32 for outputs of realistic length; with a larger alpha only the length would count.
    length_penalty: Annotated[float, Bounds(at_least=-10, at_most=10)] = 0.6
    """Alpha of the length penalty: higher prefers longer outputs; 0 compares plain log p."""
    penalty_form: PenaltyForm = field(default="gnmt", metadata=ADVANCED)
    """Divisor of log p of n tokens: ((5+n)/6)^alpha (gnmt; Wu et al. 2016, section 7), or n^alpha (length), as in
    transformers."""
    max_new_tokens: Annotated[int, Bounds(at_least=1, at_most=LONGEST)] | None = None
    """Most new tokens, including the end token; unset: length of the source or prompt + 50; in a chat the model's own
    limit or 2048, if there is room."""
    max_length_factor: Annotated[float, Bounds(at_least=0, at_most=LONGEST)] = 0.0
    """Most new tokens per token of the source or prompt, including end tokens, as in Marian, e.g. 2.5; used if
    max_new_tokens is unset; 0: length of the source or prompt + 50."""
    n_best: Annotated[int, Bounds(at_least=1)] = 1
    """Outputs per sentence, best first; at most BEAM."""
    min_new_tokens: Annotated[int, Bounds(at_least=0, at_most=LONGEST)] = field(default=0, metadata=ADVANCED)
    """Fewest new tokens, including the end token."""
    early_stopping: bool = field(default=False, metadata=ADVANCED)
    """Stop a sentence as soon as BEAM hypotheses are finished, even if a live hypothesis could still win."""
    sample: bool = False
    """Draw tokens at random. The same seed and line number give the same output in every runtime and batch."""
    # In float32, far smaller divisors would make logits infinite, and far larger would let banned tokens through.
    temperature: Annotated[float, Bounds(at_least=1e-3, at_most=1e3)] = 1.0
    """Divide logits by this before sampling: below 1 is more predictable, above 1 more random."""
    top_k: Annotated[int, Bounds(at_least=0, at_most=LONGEST)] = field(default=0, metadata=ADVANCED)
    """Sample from the k likeliest tokens; 0: all."""
    top_p: Annotated[float, Bounds(at_least=1e-6, at_most=1)] = 1.0
    """Sample from the fewest likeliest tokens with this total probability, after top-k, e.g. 0.9; 1: all."""
    min_p: Annotated[float, Bounds(at_least=0, at_most=1)] = field(default=0.0, metadata=ADVANCED)
    """Sample from tokens at least this times as likely as the likeliest, e.g. 0.05; 0: all."""
    seed: Annotated[int, Bounds(at_least=0, at_most=2**64 - 1)] = 0
    """Seed of sampling."""
    repetition_penalty: Annotated[float, Bounds(at_least=0.01, at_most=100)] = field(default=1.0, metadata=ADVANCED)
    """Above 1, repeated tokens become less likely (Keskar et al. 2019): their logit (in beam search, log p) is divided
    by this, or multiplied if it is negative."""
    presence_penalty: Annotated[float, Bounds(at_least=-2, at_most=2)] = field(default=0.0, metadata=ADVANCED)
    """Subtracted from the logit of each token already in the output, as in OpenAI's API; the prompt doesn't count."""
    frequency_penalty: Annotated[float, Bounds(at_least=-2, at_most=2)] = field(default=0.0, metadata=ADVANCED)
    """Subtracted from a token's logit once for each occurrence in the output."""
    no_repeat_ngram: Annotated[int, Bounds(at_least=0, at_most=LONGEST)] = field(default=0, metadata=ADVANCED)
    """Never repeat an n-gram of this many tokens, e.g. 3; 0: repetitions are allowed."""
    heuristic_stop: bool = False
    """Stop a sentence once no live hypothesis would win at its current length, as in transformers, even if it could win
    when longer."""
    forced_first: IdTuple = ()
    """The first tokens of every output, before its prefix, e.g. a language token; not counted in the score."""
    forced_end: bool = False
    """End outputs that reach their length limit with the end token; it is not counted in the score."""
    suppressed: IdTuple = ()
    """Tokens that are never generated."""
    suppressed_first: IdTuple = ()
    """Tokens that are never generated first (after forced_first)."""
    banned_sequences: tuple[IdTuple, ...] = ()
    """Sequences of two or more tokens that are never generated."""
    end_ids: IdTuple = ()
    """Tokens that end an output, in addition to the model's end token."""
    start_id: Annotated[int, Bounds(at_least=0, at_most=LONGEST)] | None = None
    """The decoder's start token, e.g. a language token for mBART; unset: the model's own."""
    speculate: Annotated[int, Bounds(at_least=0, at_most=64)] = 0
    """Guess so many tokens ahead and check them in one step: the same output up to rounding, sooner where guesses are
    right, e.g. if a text repeats its prompt. For decoder-only models; each text is then decoded by itself."""
    batch_tokens: Annotated[int, Bounds(at_least=1, at_most=2**30)] = 8192
    """Most rows * beam * (source + new tokens) of a batch, which bounds the memory of its caches. Outputs are estimated
    to be as long as their sources, and in decoder-only models as long as their limit."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Options from a mapping, e.g. {"beam": 4}; `UserError` for an unknown name."""
        if problems := unknown_keys(values, cls, "there is no option {!r}"):
            raise UserError(joined(problems))
        return cls(**values)

    def __post_init__(self) -> None:
        problems = [*check_fields(self), *(p for name in ID_FIELDS for p in self._check_ids(name))]
        if problems := [*problems, *self._check_sequences()]:
            raise UserError(joined(problems))
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                "{min_new_tokens} is more than {max_new_tokens}: lower one",
                min_new_tokens=self.min_new_tokens,
                max_new_tokens=self.max_new_tokens,
            )
        if self.n_best > self.beam:
            raise UserError("{n_best} is more than {beam}: widen the beam", n_best=self.n_best, beam=self.beam)
        if self.sample and self.beam > 1:
            raise UserError(
                "{sample} draws one hypothesis a row: it can't be used with {beam}", sample=True, beam=self.beam
            )
        for name, neutral in (("temperature", 1), ("top_k", 0), ("top_p", 1), ("min_p", 0)):
            if not self.sample and getattr(self, name) != neutral:
                raise UserError(
                    "{} has an effect in sampling only: add {sample}", Name(name, str(getattr(self, name))), sample=True
                )

    def _check_ids(self, name: str) -> list[str]:
        """Convert the field to a tuple of ids; return its problems."""
        ids = getattr(self, name)
        if type(ids) is tuple and not ids:
            return []
        if problems := _problems_of_ids(name, ids):
            return problems
        object.__setattr__(self, name, tuple(map(int, ids)))
        return []

    def _check_sequences(self) -> list[str]:
        sequences, name = self.banned_sequences, "banned_sequences"
        if type(sequences) is tuple and not sequences:
            return []
        if isinstance(sequences, str) or not isinstance(sequences, Sequence) or len(sequences) > LONGEST:
            return [Text("{} must be a list of lists of ids", Name(name, f"{sequences!r:.60}"))]
        if problems := [problem for ids in sequences for problem in _problems_of_ids(name, ids)]:
            return problems[:1]
        if short := [ids for ids in sequences if len(ids) < 2]:
            return [f"{name}: {list(short[0])} has fewer than two ids; ban single ids with suppressed"]
        object.__setattr__(self, name, tuple(tuple(map(int, ids)) for ids in sequences))
        return []

    @property
    def reads_history(self) -> bool:
        """Whether the allowed tokens depend on all tokens written so far."""
        repeats = self.repetition_penalty != 1 or self.no_repeat_ngram > 0 or bool(self.banned_sequences)
        return repeats or self.counts_tokens

    @property
    def counts_tokens(self) -> bool:
        """Whether scores depend on how often each token was written."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def ends(self, config: TransformerConfig) -> tuple[int, ...]:
        return config.eos_id, *self.end_ids

    @property
    def candidates(self) -> int:
        """Extensions of a sentence compared in a step of beam search: enough that at least BEAM don't end."""
        return self.beam * (2 + len(self.end_ids))

    @property
    def penalty_offset(self) -> float:
        """k of lp(n) = ((k + n) / (k + 1))^alpha."""
        return PENALTY_OFFSETS[self.penalty_form]

    def penalty(self, length: float | np.ndarray) -> float | np.ndarray:
        """lp(length), the divisor of log p."""
        return ((self.penalty_offset + length) / (self.penalty_offset + 1.0)) ** self.length_penalty


def _problems_of_ids(name: str, ids: Any) -> list[str]:
    if isinstance(ids, str) or not isinstance(ids, Sequence) or len(ids) > LONGEST:
        return [Text("{} must be a list of ids", Name(name, f"{ids!r:.60}"))]
    wrong = (id for id in ids if not _is_id(id))
    return [f"{name}: {id!r:.60} is no id" for id in islice(wrong, 1)]


def _is_id(value: Any) -> bool:
    # `type(value) is int` is the fast path: thousands of sequences may be banned.
    whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    return whole and 0 <= int(value) < LONGEST


def aligned_right(sequences: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Stack S sequences to an array (S, N), with -1 before shorter sequences; (0, 1) if there are none."""
    import numpy as np

    longest = max(map(len, sequences), default=1)
    rows = [[-1] * (longest - len(ids)) + list(ids) for ids in sequences]
    return np.array(rows, np.int64).reshape(len(sequences), longest)


def check_single(options: Mapping[str, Any], verb: str, instead: str) -> None:
    """Raise `UserError` for an n_best above 1: method `verb` returns one output, method `instead` several."""
    if options.get("n_best", 1) != 1:
        raise UserError(
            "{n_best}: {} returns only the best output; {} returns several",
            verb,
            instead,
            n_best=f"{options['n_best']!r:.60}",
        )


def check_prefix(
    prefix: Ids | None, rows: int, config: TransformerConfig, end_ids: Sequence[int] = ()
) -> list[np.ndarray]:
    """Check the forced first tokens of each of `rows` outputs, and return them as arrays. prefix: a list of ids for
    each row ([]: no forced tokens), or None.

    end_ids: tokens that end an output, in addition to the model's end token. Raises `UserError` for padding, start and
    end tokens, and for ids outside the vocabulary.
    """
    import numpy as np

    from mlx_transformer.core.inputs import check_ids, listed

    if prefix is None:
        return [np.zeros(0, np.int64)] * rows
    prefix = listed(prefix, "prefix")
    if len(prefix) != rows:
        raise UserError(f"prefix has {len(prefix)} rows for {rows} inputs: give one list (it may be empty) for each")
    checked = check_ids(prefix, config.vocab_size, "prefix", empty=True)
    for i, row in enumerate(checked):
        for name in ("pad_id", "bos_id", "eos_id"):
            places = np.flatnonzero(row == getattr(config, name))
            if places.size:
                raise UserError(f"prefix row {i}, position {places[0]}: {name} {row[places[0]]} can't be forced")
        for id in set(row.tolist()) & {*end_ids}:
            raise UserError(f"prefix row {i}: {id} can't be forced: it is one of end_ids")
    return checked


def check_options(options: Options, config: TransformerConfig) -> None:
    """Raise `UserError` for ids outside the vocabulary, ids that can't be forced, and a beam wider than the vocabulary.

    Also for a start_id of a decoder-only model.
    """
    sequences = {"banned_sequences": [id for ids in options.banned_sequences for id in ids]}
    for name, ids in {**{name: getattr(options, name) for name in ID_FIELDS}, **sequences}.items():
        for id in ids:
            if id >= config.vocab_size:
                raise UserError(f"{name}: {id} is outside the vocabulary of {config.vocab_size}")
            if name == "forced_first" and id in (config.pad_id, *options.ends(config)):
                raise UserError(f"{name}: {id} can't be forced: it is padding, or an end")
    if options.start_id is not None:
        if not config.has_encoder:
            raise UserError("start_id: a decoder-only model continues its prompt; leave it out")
        if options.start_id >= config.vocab_size:
            raise UserError(f"start_id: {options.start_id} is outside the vocabulary of {config.vocab_size}")
    if options.beam > config.vocab_size:
        raise UserError("{beam} is more than the vocabulary's {} tokens", config.vocab_size, beam=options.beam)


def length_limits(
    sources: Iterable[np.ndarray], prefix: Sequence[np.ndarray], options: Options, config: TransformerConfig, hard: bool
) -> np.ndarray:
    """Most new tokens of each row (N,), including eos.

    hard: the runtime has no position past P = `config.max_positions`. The last new token is never fed back, so a
    decoder generates up to P tokens after its start token; a decoder-only model's prompt counts too. If not hard, the
    limit is `EXTENDED` times P. Raises `UserError` for sources and limits above that, and prefixes above their limit.
    """
    import numpy as np

    lengths = np.array([len(row) for row in sources])
    prompts = lengths - 1 if config.architecture == "decoder" else np.zeros_like(lengths)
    room = config.max_positions - prompts
    longest = lengths if config.has_encoder else prompts + 1
    what = "source" if config.has_encoder else "prompt"
    for i in np.flatnonzero(longest > config.max_positions) if hard else ():
        most = config.max_positions
        raise UserError(f"{what} row {i}: {lengths[i]} tokens, the model takes at most {most}; shorten it")
    if options.max_new_tokens is None:
        limits = np.where(room >= 1, np.minimum(usual_limits(lengths, options), room), EXTRA_TOKENS)
        limits = np.maximum(limits, options.min_new_tokens)
    else:
        limits = np.full(len(lengths), options.max_new_tokens)
    name = "min_new_tokens" if options.max_new_tokens is None else "max_new_tokens"
    for i in np.flatnonzero(limits > room) if hard else ():
        raise UserError(
            "{}: {} row {} leaves room for {} tokens ({max_positions})",
            *(Name(name, str(limits[i])), what, i, room[i]),
            max_positions=config.max_positions,
        )
    for i in np.flatnonzero(limits > max(EXTENDED * config.max_positions, EXTRA_TOKENS + lengths.max(initial=0))):
        raise UserError(
            "{} is more than {} times the model's {max_positions}",
            *(Name(name, str(limits[i])), EXTENDED),
            max_positions=config.max_positions,
        )
    first = len(options.forced_first)
    for i, row in enumerate(prefix):
        if first + len(row) > limits[i]:
            raise UserError(
                "prefix row {}: {} tokens, but {max_new_tokens} is {}: raise it", i, first + len(row), limits[i]
            )
    return limits


def usual_limits(lengths: NDArray[np.int64], options: Options) -> NDArray[np.int64]:
    """Default limits of new tokens (N,) for sources of these lengths (N,)."""
    import numpy as np

    if options.max_length_factor == 0:
        return lengths + EXTRA_TOKENS
    return np.ceil(lengths.astype(np.float32) * np.float32(options.max_length_factor)).astype(np.int64)


def expected_tokens(
    lengths: np.ndarray, limits: np.ndarray, options: Options, prefix: Sequence[np.ndarray] = ()
) -> np.ndarray:
    """Estimated new tokens (N,) of translations, to plan batches: the length of the source, within the limits.

    Outputs rarely reach their limits: planned by those, batches would be a third of the size.
    """
    import numpy as np

    least = np.array([len(row) for row in prefix]) if len(prefix) else np.zeros_like(lengths)
    return np.minimum(np.maximum(lengths, np.maximum(least, options.min_new_tokens)), limits)
