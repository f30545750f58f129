"""How good the model is on text that it doesn't learn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from mlx_transformer.data.corpus import ParallelText
from mlx_transformer.data.documents import Documents
from mlx_transformer.data.epochs import BatchesByEpoch
from mlx_transformer.generation.likelihood import perplexity_of
from mlx_transformer.generation.scoring import score
from mlx_transformer.runtime.decoding import evaluating

from .step import TrainStep

SAMPLES = 3


def validated(
    step: TrainStep,
    batches: BatchesByEpoch,
    text: ParallelText | Documents,
    sentences: int,
    stopped: Callable[[], bool],
) -> tuple[dict[str, float], list[dict[str, str]]]:
    """(scores, samples); empty once `stopped()` is true.

    loss: mean in nats a target token, as trained (label smoothing included); perplexity: e to the same without
    smoothing; of pairs, scores of greedy translations of the first `sentences`, and the first few of these as samples.
    """
    samples: list[dict[str, str]] = []
    total = plain = 0.0
    tokens = 0
    with evaluating(step.model):
        for batch in batches.batches(0):
            if stopped():
                return {}, []
            loss, nll = step.losses(batch)
            total, plain, tokens = total + float(np.array(loss)), plain + float(np.array(nll)), tokens + batch.tokens
        values = {"loss": total / max(1, tokens)}
        values["perplexity"] = perplexity_of(plain / max(1, tokens))
        count = min(sentences, len(text))
        if count and isinstance(text, ParallelText):
            translated = step.model.translate(text.source[:count], overlong="truncate")
            scores = score(translated, text.target[:count])
            values |= {name: scores[name] for name in ("bleu", "chrf", "exact_match")}
            few = zip(text.source, translated, text.target, strict=False)
            samples = [{"source": s, "output": t, "reference": r} for s, t, r in islice(few, min(SAMPLES, count))]
    return values, samples
