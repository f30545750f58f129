"""Words that two sentences don't share."""

import pytest

from mlx_transformer.report.comparing import MAX_WORD_PAIRS, marked


def shown(a: str, b: str) -> tuple[str, str]:
    first, second = marked(a, b)
    assert ("".join(text for text, _ in first), "".join(text for text, _ in second)) == (a, b)
    return tuple("".join(f"[{text}]" if new else text for text, new in pieces) for pieces in (first, second))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("one two", "one two", ("one two", "one two")),
        ("one two three", "one 2 three", ("one [two] three", "one [2] three")),
        ("a big dog", "a dog", ("a [big ]dog", "a dog")),
        ("", "new", ("", "[new]")),
        ("23:09", "23:19", ("23:[09]", "23:[19]")),
        ("größer", "grösser", ("[größer]", "[grösser]")),
        ("東京都です", "京都です", ("[東]京都です", "京都です")),
        ("a  b", "a b", ("a[  ]b", "a[ ]b")),
    ],
)
def test_marked(a, b, expected):
    assert shown(a, b) == expected


def test_what_takes_too_long_differs_as_a_whole():
    words = "x " * (int(MAX_WORD_PAIRS**0.5) // 2 + 1)
    assert marked(words, f"{words}y") == ([(words, True)], [(f"{words}y", True)])
