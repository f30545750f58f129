"""Scores of encoders, against numbers that are counted by hand."""

import math

import numpy as np
import pytest

from mlx_transformer.data.labelled import Labelled
from mlx_transformer.generation.evaluate import entities_of, numbers_of, ranking_scores, spearman
from mlx_transformer.system.errors import UserError

DIRECTIONS = np.eye(12, dtype=np.float32)


def test_ranks_give_the_scores_of_their_definitions():
    """One query whose documents come first and third, one whose document comes eleventh, one that ties with another."""
    documents = DIRECTIONS
    queries = np.stack([np.linspace(12, 1, 12), np.linspace(12, 1, 12), np.array([5, 5, *[0] * 10])])
    found = ranking_scores(queries, documents, [[0, 2], [10], [1]])
    assert found["recall@1"] == pytest.approx(np.mean([1 / 2, 0, 0]))
    assert found["recall@5"] == pytest.approx(np.mean([1, 0, 1]))
    assert found["recall@10"] == pytest.approx(np.mean([1, 0, 1]))
    assert found["mrr"] == pytest.approx(np.mean([1, 1 / 11, 1 / 2]))
    of_first = (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert found["ndcg@10"] == pytest.approx(np.mean([of_first, 0, 1 / math.log2(3)]))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 20, 90], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        ([1, 2, 2, 4], [1, 2, 3, 4], 0.9486832980505138),  # 3 / sqrt(10): ranks 1, 2.5, 2.5, 4
        ([1, 1], [1, 2], 0),
    ],
)
def test_rank_correlation(a, b, expected):
    assert spearman(a, b) == pytest.approx(expected)


def test_words_of_one_label_are_one_entity_as_tag_has_them():
    parts = [(0, 3, "B-X", "I-X"), (4, 7, "I-X", "I-X"), (8, 11, "B-X", "I-X"), (12, 15, "O", "O"), (16, 19, "Y", "Y")]
    assert entities_of(parts, "abc abc abc abc abc") == {("X", 0, 7), ("X", 8, 11), ("Y", 16, 19)}


def test_what_has_no_numbers():
    with pytest.raises(UserError, match="pairs of texts that have a number each"):
        numbers_of(Labelled("label", ["a"], ["1"]))
    with pytest.raises(UserError, match="pair 1: 'good' is no finite number"):
        numbers_of(Labelled("label", [("a", "b")], ["good"]))
    assert numbers_of(Labelled("label", [("a", "b")], [" 4.5"])) == [4.5]
