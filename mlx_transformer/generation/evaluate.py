"""Scores on text with references: translations (BLEU, chrF, TER), vectors (retrieval, similarity) and labels.

Retrieval: each distinct source in a file of pairs is a query; all distinct targets and negatives are the documents. The
query's own targets are the relevant documents, r of them. A document exactly as near as a relevant one counts as
nearer.

    recall@k    relevant documents among the k nearest, divided by r
    MRR         1 / the rank of the first relevant document
    nDCG@10     sum of 1 / log2(1 + rank) over the relevant documents among the ten nearest, divided by the most that r
                documents can reach (Jarvelin and Kekalainen 2002, with binary relevance)

All are means over the queries. Spearman's correlation is Pearson's correlation of the ranks; equal numbers share their
mean rank.
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

from .heads import answer, classify, tag
from .line_files import LineReport
from .text_options import AnswerOptions
from .verbs import TextVerbs


def score(hypotheses: Sequence[str], references: Sequence[str], ter: bool = False) -> dict[str, Any]:
    """Return corpus scores of translations against references, line by line.

    `bleu` and `chrf` are percentages (sacreBLEU 13a, cased, one reference; Post 2018, Popovic 2015), each with its
    signature. `exact_match` is the percentage of lines that equal their reference. ter=True adds `ter`, which is slow:
    edits for each word of the references, in percent, lower is better (Snover et al. 2006).

    Raises `UserError` if the counts of lines differ, or if there are none.
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
"""The values of k for recall@k."""
QUERIES = 256
"""Queries compared with all documents at a time."""


def retrieval(model: TextVerbs, text: Matches, done: DoneShare = lambda share: None) -> dict[str, Any]:
    """Score a model's vectors on pairs; see the module for the measures.

    Uses the model's prompts "query" and "document", if it has them. Raises `UserError` for a model that makes no
    vectors of texts.
    """
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
    """Return {measure: mean over queries}; queries (N, W), documents (M, W), `relevant`: document indices of each
    query."""
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
    """Embed texts with the named prompt, if the model has it; scale to length 1 unless the model compares by dot
    product."""
    embedding = model.text_embedding
    named = {"prompt_name": name} if embedding is not None and name in embedding.prompts else {}
    vectors = model.embed(list(texts), done=done, **named)
    if embedding is not None and embedding.similarity == "dot":
        return vectors
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _ranks(similar: NDArray, own: Sequence[int]) -> NDArray[np.int64]:
    """Return the ranks (r,) of the relevant documents, ascending; two relevant documents never share a rank."""
    others = np.delete(similar, own)
    best = np.sort(similar[list(own)])[::-1]
    return np.array([1 + i + int((others >= each).sum()) for i, each in enumerate(best)])


def _gain(ranks: NDArray) -> float:
    return float((1 / np.log2(1 + ranks)).sum())


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation; 0 if all numbers of either list are equal."""
    ranks = [_mean_ranks(np.asarray(each, np.float64)) for each in (a, b)]
    centred = [each - each.mean() for each in ranks]
    length = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / length if length else 0.0


def _mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place.ravel()]


def similarity(model: TextVerbs, text: Labelled, done: DoneShare = lambda share: None) -> dict[str, Any]:
    """Return Spearman's correlation between the cosine or dot-product similarity of each pair and its number.

    Raises `UserError` if the text isn't pairs with numbers.
    """
    scores = numbers_of(text)
    first, second = zip(*text.texts, strict=True)
    a = _embedded(model, "", first, lambda share: done(share / 2))
    b = _embedded(model, "", second, lambda share: done((1 + share) / 2))
    products = (a.astype(np.float64) * b.astype(np.float64)).sum(axis=1)
    return {"pairs": len(text), "spearman": spearman(products.tolist(), scores)}


def numbers_of(text: Labelled) -> list[float]:
    """Return the number of each pair. Raises `UserError` if the text isn't pairs with finite numbers."""
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
    """Score a model's predictions on labelled text: exact match, F1, accuracy or correlation, by the text's form.

    Raises `UserError` for a model without a head of the matching kind.
    """
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
    """Join labelled parts of a text to entities (label, start, end), as `tag` joins tokens."""
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
    """Return precision, recall and F1 over all texts together (micro average)."""
    right = sum(len(f & w) for f, w in zip(predicted, expected, strict=True))
    precision, recall = (right / max(1, sum(map(len, each))) for each in (predicted, expected))
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(precision + recall, 1e-12)}
