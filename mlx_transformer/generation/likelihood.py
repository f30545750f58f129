"""Log-probabilities of given outputs, computed step by step as in a search, perplexity of documents, and how far two
models are apart.

Shapes: B sentences, L tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.inputs import Ids, Sources, check_ids, of_one_length
from mlx_transformer.decoding.options import Options
from mlx_transformer.decoding.search import DoneShare, batches, reported
from mlx_transformer.decoding.steps import Model
from mlx_transformer.system.errors import UserError

if TYPE_CHECKING:
    from mlx_transformer.text.tokenizer import Tokenizer

T = TypeVar("T")
AT_ONCE = 64
"""Positions whose probabilities are in float64 at a time."""
LARGEST_EXPONENT = 700.0
"""Larger exponents make exp infinite in float64."""


def log_probabilities(
    model: Model,
    ids: Ids,
    targets: Ids,
    *,
    start_id: int | None = None,
    forced_first: Sequence[int] = (),
    done: DoneShare | None = None,
) -> list[np.ndarray]:
    """Return for each input the log-probabilities of its target's tokens (float32), each given the input and earlier
    tokens.

    ids, start_id: as for `search`. targets: outputs without start token, with eos if its probability should count.
    forced_first: ids before each target that aren't scored, e.g. its language's. done: called with the finished share
    of inputs. Unlike in a search, no token is banned.
    Raises `UserError` for ids outside the vocabulary, empty rows, and rows longer than the model takes.
    """
    config = model.config
    if not config.has_decoder:
        raise UserError("an encoder-only model generates nothing, so its outputs have no probability")
    if len(ids) != len(targets):
        raise UserError(f"{len(ids)} inputs but {len(targets)} targets: they must be equally many")
    sources = Sources.of(config, ids=ids)
    sources.start = sources.start if start_id is None else start_id
    first = np.asarray(forced_first, np.int64)
    target_rows = [np.concatenate([first, row]) for row in check_ids(targets, config.vocab_size, "target")]
    for i, (source, target) in enumerate(zip(sources, target_rows, strict=True)):
        prompt = 0 if config.has_encoder else len(source) - 1
        longest = max(len(source), prompt + len(target))
        if longest > config.max_positions and not model.extends_positions:
            raise UserError(f"row {i}: {longest} tokens, the model takes at most {config.max_positions}")
    lengths = sources.lengths
    steps = np.array([len(row) for row in target_rows], int)
    rows: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sources)
    positions = None if model.extends_positions or config.has_encoder else config.max_positions
    # Sorted by target length, since a batch takes as many steps as its longest target.
    for index in reported(batches(steps, lengths, lengths, Options(), positions), len, len(sources), done):
        values = _batch(model, sources[index], [target_rows[i] for i in index])
        for i, row in zip(index, values, strict=True):
            rows[i] = row[len(first) : steps[i]]
    for i, row in enumerate(rows):
        if not np.isfinite(row).all():
            raise UserError(f"source row {i}: the model's logits are not finite; check its weights")
    return rows


def pair_ids(
    tokenizer: Tokenizer, lines: str | Sequence[str], texts: str | Sequence[str], continues: bool
) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each line and of its text, as `log_probabilities` takes them: a translation with its end token,
    or (continues) what follows the line in a decoder, without one. There both are cut into tokens as one text; behind
    an empty line stands the whole text. `UserError` for anything but text, and an empty text to follow.
    """
    from .translate import as_lines  # lazy: it imports the tokenizer, which scoring ids doesn't need

    source, target = as_lines(lines), as_lines(texts)
    if len(source) != len(target):
        raise UserError(f"{len(source)} lines but {len(target)} translations: they must be equally many")
    if not continues:
        return list(zip(tokenizer.source.encode_batch(source), tokenizer.encode_batch(target), strict=True))
    whole = tokenizer.prompts([line + text for line, text in zip(source, target, strict=True)])
    pairs = []
    for i, (begun, ids) in enumerate(zip(tokenizer.prompts(source), whole, strict=True)):
        shared = next((n for n, pair in enumerate(zip(begun, ids, strict=False)) if pair[0] != pair[1]), len(begun))
        pairs.append((ids[:shared] or [tokenizer.bos_id], ids[shared:]))
        if not ids[shared:]:
            raise UserError(f"pair {i + 1}: its text has no token that follows the line; give one")
    return pairs


def _batch(model: Model, sources: Sources, targets: list[np.ndarray]) -> np.ndarray:
    """Return log-probabilities (B, longest target); values after the end of a target are meaningless."""
    xp = model.arrays
    tokens = np.full((len(targets), max(map(len, targets))), model.config.eos_id, np.int32)
    for i, row in enumerate(targets):
        tokens[i, : len(row)] = row
    decoder, logits = model.start(sources)
    values = []
    for t in range(tokens.shape[1]):
        token = xp.asarray(tokens[:, t].copy())
        logits = xp.float32(logits)
        values.append(xp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - xp.logsumexp(logits, axis=1))
        if xp.lazy:
            xp.queue(values[-1])
        if t + 1 < tokens.shape[1]:
            logits = decoder.step(token)
    return xp.numpy(xp.stack(values, axis=1))


def perplexity(
    config: TransformerConfig,
    tokenizer: Tokenizer,
    logits: Callable[[list[list[int]]], Any],
    texts: Sequence[str],
    done: Callable[[float], None],
) -> dict[str, Any]:
    """Return documents, tokens, perplexity and bits per byte, which doesn't depend on the vocabulary.

    logits: ids (B, L) -> (B, L, V). A document longer than the model takes is cut into pieces; each is predicted by
    itself from the token before it, as in training. Each document ends with an end token; but with a published model's
    vocabulary its tokens are those of its prompt, of which the first is not predicted. done: called with the finished
    share.
    """
    whole, most = tokenizer.prompts(texts), config.max_positions
    if not tokenizer.is_makers:
        whole = [[*ids, config.eos_id] for ids in whole]
    rows = [ids[start : start + most + 1] for ids in whole for start in range(0, len(ids) - 1, most)]
    total, tokens, finished = 0.0, sum(len(row) - 1 for row in rows), 0
    if not tokens:
        raise UserError("the text has no token that another precedes: give more of it")
    for part in of_one_length([len(row) for row in rows]):
        batch = np.array([rows[i] for i in part], np.int64)
        z, labels = np.asarray(logits(batch[:, :-1].tolist()), np.float32), batch[:, 1:].reshape(-1)
        z = z.reshape(len(labels), -1)  # (B L, V)
        for begin in range(0, len(labels), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            total -= float(np.take_along_axis(_log_softmax(z[some]), labels[some, None], axis=-1).sum())
        finished += labels.size
        done(finished / tokens)
    if not math.isfinite(total):
        raise UserError("the model's logits are not finite; check its weights")
    return {
        "documents": len(texts),
        "tokens": tokens,
        "perplexity": round(perplexity_of(total / tokens), 4),
        "bits_per_byte": round(total / math.log(2) / sum(len(text.encode()) for text in texts), 4),
    }


def perplexity_of(nats: float) -> float:
    """Return exp of the mean negative log-probability of a token; finite however bad the model is."""
    return math.exp(min(nats, LARGEST_EXPONENT))


@dataclass(frozen=True)
class Divergence:
    """How far a model is from another, the wide one, on tokens of a text, each given those before it.

    kl: mean Kullback-Leibler divergence from the wide model's probabilities, in nats. agreement: share of positions
    with the same best token; same: share of texts with all of them.
    """

    texts: int
    tokens: int
    kl: float
    agreement: float
    same: float
    perplexity: float
    perplexity_wide: float

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.4f}, {self.agreement:.2%} of the best tokens, perplexity {self.perplexity:.2f}"
            f" ({self.perplexity_wide:.2f}); {self.tokens:,} tokens"
        )


def divergence(
    both: Callable[[T], tuple[np.ndarray, np.ndarray]],
    texts: Sequence[tuple[T, Sequence[int]]],
    done: Callable[[float], None] = lambda share: None,
) -> Divergence:
    """Compare two models on texts. both: a text -> the wide model's logits (L, V), and the other's.

    texts: (text, the next token of each position (L,)). done: called with the finished share. Raises `UserError` if
    logits aren't finite.
    """
    kl = nats = nats_wide = 0.0
    tokens, best, same = 0, 0, 0
    for finished, (text, labels) in enumerate(texts, start=1):
        pair = both(text)
        equal = 0
        for begin in range(0, len(labels), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            wide, other = (_log_softmax(logits[some]) for logits in pair)  # (P, V)
            places = np.arange(len(wide)), np.asarray(labels[some])
            kl += float((np.exp(wide) * (wide - other)).sum())
            nats_wide, nats = nats_wide - float(wide[places].sum()), nats - float(other[places].sum())
            equal += int((wide.argmax(axis=1) == other.argmax(axis=1)).sum())
        tokens, best, same = tokens + len(labels), best + equal, same + (equal == len(labels))
        done(finished / len(texts))
    if not math.isfinite(kl + nats + nats_wide):
        raise UserError("the model's logits are not finite; check its weights")
    counts = len(texts), tokens, kl / tokens, best / tokens, same / len(texts)
    return Divergence(*counts, perplexity_of(nats / tokens), perplexity_of(nats_wide / tokens))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    z -= np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return z
