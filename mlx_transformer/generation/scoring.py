"""How good translations are: sacreBLEU, chrF and TER with their signatures, exact match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_transformer.system.errors import UserError


def score(hypotheses: Sequence[str], references: Sequence[str], ter: bool = False) -> dict[str, Any]:
    """Return corpus scores of equally many lines.

    `bleu` and `chrf` are percentages (sacreBLEU 13a, cased, one reference; Post 2018, Popovic 2015); `exact_match` is
    the share of lines that equal their reference to the letter, in percent. `ter`, which takes its time: edits a word
    of the references, in percent, less is better (Snover et al. 2006). Raises `UserError` on unequal counts.
    """
    if len(hypotheses) != len(references):
        raise UserError(f"{len(hypotheses)} translations but {len(references)} references: they must be equally many")
    if not references:
        raise UserError("no lines to score")
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    bleu, chrf = BLEU(), CHRF()
    bleu_score = bleu.corpus_score(list(hypotheses), [list(references)])
    chrf_score = chrf.corpus_score(list(hypotheses), [list(references)])
    equal = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    with_ter: dict[str, Any] = {}
    if ter:
        from sacrebleu.metrics.ter import TER

        metric = TER()
        with_ter["ter"] = round(metric.corpus_score(list(hypotheses), [list(references)]).score, 2)
        with_ter["ter_signature"] = str(metric.get_signature())
    return {
        "lines": len(references),
        "bleu": round(bleu_score.score, 2),
        "bleu_signature": str(bleu.get_signature()),
        "chrf": round(chrf_score.score, 2),
        "chrf_signature": str(chrf.get_signature()),
        **with_ter,
        "exact_match": round(100 * equal / len(references), 2),
    }
