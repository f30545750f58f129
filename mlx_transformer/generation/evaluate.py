"""How good translations are: sacreBLEU, chrF and TER with their signatures, exact match.

How good an encoder is on given files, whatever runtime computes it: what it finds, how its similarities rank pairs,
how often its labels are right.

Retrieval. Each distinct source of a file of pairs is a query, all distinct targets and negatives are the documents; its
own targets are relevant, r of them. A document that is as near as a relevant one counts as nearer.

    recall@k    how many of the relevant ones are among the k nearest, over r
    MRR         1 / the rank of the first relevant one
    nDCG@10     sum of 1 / log2(1 + rank) over the relevant ones among the ten nearest, over the most that r can have
                (Jarvelin and Kekalainen 2002, of binary relevance)

All are means over the queries. Spearman's correlation is Pearson's of the ranks, equal numbers having their mean rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_transformer.core.heads import BEGINS, CONTINUES, OUTSIDE
from mlx_transformer.data.labelled import Labelled, Part
from mlx_transformer.data.matches import Matches
from mlx_transformer.decoding.search import DoneShare
from mlx_transformer.system.errors import UserError

from .arguments import AnswerOptions
from .heads import answer, classify, tag
from .line_files import LineReport
from .verbs import TextVerbs


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


NEAREST = (1, 5, 10)
"""The k of recall@k."""
QUERIES = 256
"""Queries that are compared with all documents at a time."""


def retrieval(model: TextVerbs, text: Matches, done: DoneShare = lambda share: None) -> dict[str, Any]:
    """Return the scores of a model's vectors on pairs; queries and documents have the prompts of these names, if the
    model has them. `UserError` for a model that has no vectors of texts."""
    queries = list(dict.fromkeys(text.columns[0]))
    documents = list(dict.fromkeys(each for column in text.columns[1:] for each in column))
    places = {each: i for i, each in enumerate(documents)}
    relevant: dict[str, set[int]] = {query: set() for query in queries}
    for query, target in zip(*text.columns[:2], strict=True):
        relevant[query].add(places[target])
    whole = len(queries) + len(documents)
    query_vectors = _embedded(model, "query", queries, lambda share: done(share * len(queries) / whole))
    document_vectors = _embedded(
        model, "document", documents, lambda share: done(1 - (1 - share) * len(documents) / whole)
    )
    scores = ranking_scores(query_vectors, document_vectors, [sorted(relevant[query]) for query in queries])
    return {"queries": len(queries), "documents": len(documents), **scores}


def ranking_scores(queries: NDArray, documents: NDArray, relevant: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the means over queries (N, W), of which `relevant` has the documents' (M, W) indices, by their names."""
    rows = []
    for begin in range(0, len(queries), QUERIES):
        similar = queries[begin : begin + QUERIES].astype(np.float64) @ documents.astype(np.float64).T
        rows += [_ranks(each, own) for each, own in zip(similar, relevant[begin : begin + QUERIES], strict=True)]
    values = {f"recall@{k}": _mean([(ranks <= k).mean() for ranks in rows]) for k in NEAREST}
    values["mrr"] = _mean([1 / ranks[0] for ranks in rows])
    values["ndcg@10"] = _mean(
        [_gain(ranks[ranks <= 10]) / _gain(np.arange(1, 1 + min(10, len(ranks)))) for ranks in rows]
    )
    return values


def _embedded(model: TextVerbs, name: str, texts: Sequence[str], done: DoneShare) -> NDArray[np.float32]:
    """Return Vectors, of length 1 unless the model compares by products."""
    embedding = model.text_embedding
    named = {"prompt_name": name} if embedding is not None and name in embedding.prompts else {}
    vectors = model.embed(list(texts), done=done, **named)
    if embedding is not None and embedding.similarity == "dot":
        return vectors
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _ranks(similar: NDArray, own: Sequence[int]) -> NDArray[np.int64]:
    """Return the ranks (r,) of the relevant documents, the best first; relevant ones of equal nearness share no
    rank."""
    others = np.delete(similar, own)
    best = np.sort(similar[list(own)])[::-1]
    return np.array([1 + i + int((others >= each).sum()) for i, each in enumerate(best)])


def _gain(ranks: NDArray) -> float:
    return float((1 / np.log2(1 + ranks)).sum())


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation of two lists of numbers; 0 where one of them has only equal ones."""
    ranks = [_mean_ranks(np.asarray(each, np.float64)) for each in (a, b)]
    centred = [each - each.mean() for each in ranks]
    length = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / length if length else 0.0


def _mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place.ravel()]


def similarity(model: TextVerbs, text: Labelled, done: DoneShare = lambda share: None) -> dict[str, Any]:
    """Return how well the similarities of pairs rank as their numbers do. `UserError` for text without numbers."""
    scores = numbers_of(text)
    first, second = zip(*text.texts, strict=True)
    a = _embedded(model, "", first, lambda share: done(share / 2))
    b = _embedded(model, "", second, lambda share: done((1 + share) / 2))
    products = (a.astype(np.float64) * b.astype(np.float64)).sum(axis=1)
    return {"pairs": len(text), "spearman": spearman(products.tolist(), scores)}


def numbers_of(text: Labelled) -> list[float]:
    """Return the number of each pair; `UserError` for what isn't pairs with numbers."""
    if text.form not in ("label", "score") or not all(isinstance(each, tuple) for each in text.texts):
        raise UserError("similarities are compared with pairs of texts that have a number each")
    numbers = []
    for line, each in enumerate(text.targets, start=1):
        try:
            numbers.append(float(each))
        except ValueError:
            numbers.append(math.nan)
        if not math.isfinite(numbers[-1]):
            raise UserError(f"pair {line}: {each!r:.60} is no finite number")
    return numbers


def labels(model: TextVerbs, text: Labelled, report: LineReport) -> dict[str, Any]:
    """Return how often a model's labels are those of the text, by the kind of its head. `UserError` for a model whose
    head has none of the kind."""
    if text.form == "answer":
        pairs = [each for each in text.texts if isinstance(each, tuple)]
        answers = answer(model.encoder_head("spans", "evaluate"), pairs, AnswerOptions(), report)
        both = [(f, c[slice(*t)]) for f, (_, c), t in zip(answers, pairs, text.targets, strict=True) if t is not None]
        return {"questions": len(both), "exact_match": _mean([f is not None and f.text == w for f, w in both])}
    if text.form == "entities":
        lines = [each for each in text.texts if isinstance(each, str)]
        tagged = tag(model.encoder_head("token-classes", "evaluate"), lines, report)
        named = [{(e.label, e.start, e.end) for e in each} for each in tagged]
        return {
            "texts": len(text),
            **_f1(named, [entities_of(*each) for each in zip(text.targets, lines, strict=True)]),
        }
    classes = classify(model.encoder_head("classes", "evaluate"), text.texts, text.form == "labels" or None, report)
    if text.form == "score":
        return {"texts": len(text), "spearman": spearman([each[0].probability for each in classes], text.targets)}
    if text.form == "labels":
        chosen = [{one.label for one in each if one.probability > 0.5} for each in classes]
        return {"texts": len(text), **_f1(chosen, [set(each) for each in text.targets])}
    best = [each[0].label for each in classes]
    of_each = [_f1([{b} & {n} for b in best], [{t} & {n} for t in text.targets])["f1"] for n in text.labels]
    right = [b == t for b, t in zip(best, text.targets, strict=True)]
    return {"texts": len(text), "accuracy": _mean(right), "macro_f1": _mean(of_each)}


def entities_of(parts: Sequence[Part], text: str) -> set[tuple[str, int, int]]:
    """Return the entities (label, start, end) that labelled parts of a text make up, as `tag` joins tokens."""
    entities: list[tuple[str, int, int]] = []
    for start, end, label, _ in parts:
        name = label[len(BEGINS) :] if label.startswith((BEGINS, CONTINUES)) else label
        goes_on = bool(entities) and entities[-1][0] == name and not label.startswith(BEGINS)
        if goes_on and not text[entities[-1][2] : start].strip():
            entities[-1] = (name, entities[-1][1], end)
        else:
            entities.append((name, start, end))
    return {each for each in entities if each[0] != OUTSIDE}


def _f1(predicted: Sequence[set[Any]], expected: Sequence[set[Any]]) -> dict[str, float]:
    """Return precision, recall and their harmonic mean, over all texts together."""
    right = sum(len(f & w) for f, w in zip(predicted, expected, strict=True))
    precision, recall = (right / max(1, sum(map(len, each))) for each in (predicted, expected))
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(precision + recall, 1e-12)}
