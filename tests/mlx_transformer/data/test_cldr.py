"""The built-in corpus: exact, unambiguous, disjoint, reproducible; and what it refuses."""

import datetime
import hashlib
from collections import Counter

import pytest
from babel import Locale

from mlx_transformer.data.cldr import DEFAULT_KIND_WEIGHTS, KINDS, build, measures, write
from mlx_transformer.data.corpus import read_lines, read_parallel
from mlx_transformer.system.errors import UserError

EN, DE = Locale.parse("en"), Locale.parse("de")


@pytest.fixture(scope="module")
def corpus():
    return build("cldr:en-de", train_pairs=6000, held_out_per_kind=30, valid_per_kind=10, seed=1)


def test_sizes_and_kinds(corpus):
    assert len(corpus.train) == 6000
    assert len(corpus.held_out) == 300
    assert len(corpus.valid) == 100
    assert Counter(corpus.held_out.kinds) == dict.fromkeys(KINDS, 30)
    assert Counter(corpus.valid.kinds) == dict.fromkeys(KINDS, 10)
    assert corpus.held_out.kinds[:10] == list(KINDS)  # taking turns: any part has all kinds
    shares = Counter(corpus.train.kinds)
    total = sum(DEFAULT_KIND_WEIGHTS.values())
    assert all(abs(shares[kind] - 6000 * weight / total) <= 60 for kind, weight in DEFAULT_KIND_WEIGHTS.items())


def test_sets_share_neither_source_nor_target(corpus):
    sets = (corpus.train, corpus.valid, corpus.held_out)
    for i, one in enumerate(sets):
        for other in sets[i + 1 :]:
            assert not set(one.source) & set(other.source)
            assert not set(one.target) & set(other.target)


def test_a_source_has_one_target_and_comes_once(corpus):
    sources = corpus.train.source + corpus.valid.source + corpus.held_out.source
    assert len(set(sources)) == len(sources)


def test_same_arguments_same_bytes(corpus):
    again = build("cldr:EN-de", train_pairs=6000, held_out_per_kind=30, valid_per_kind=10, seed=1)
    assert again == corpus
    other = build("cldr:en-de", train_pairs=500, held_out_per_kind=5, valid_per_kind=5, seed=2)
    assert other.train.digests != build(train_pairs=500, held_out_per_kind=5, valid_per_kind=5, seed=3).train.digests
    assert (
        hashlib.sha256("".join(f"{s}\n" for s in other.train.source).encode()).hexdigest()
        == (other.train.digests["source"])
    )


def test_every_held_out_name_stands_alone_in_training(corpus):
    names = {
        kind: {s for s, k in zip(corpus.train.source, corpus.train.kinds, strict=True) if k == kind}
        for kind in ("territory", "language")
    }
    territories = {code: name for code, name in EN.territories.items() if name in names["territory"]}
    languages = {code: name for code, name in EN.languages.items() if name in names["language"]}
    assert len(territories) > 200
    assert len(languages) > 300
    known = set(territories.values()) | set(languages.values())
    for source, kind in zip(corpus.held_out.source, corpus.held_out.kinds, strict=True):
        if kind in ("territory", "language"):
            assert source not in known  # a combination, not a name
            rest = source
            for name in sorted(known, key=len, reverse=True):
                rest = rest.replace(name, "")
            assert rest.replace(" and ", "").replace(" or ", "").strip(" ,()andor") == "", source


def test_phrases_are_real_translations(corpus):
    pairs = dict(zip(corpus.train.source, corpus.train.target, strict=True))
    months = {EN.months["format"]["wide"][m]: DE.months["format"]["wide"][m] for m in range(1, 13)}
    checked = 0
    for source, target in pairs.items():
        for month, monat in months.items():
            if month in source.split() and month != "May":
                assert monat in target, (source, target)
                checked += 1
    assert checked > 300
    assert sum("US dollar" in s and "US-Dollar" in t for s, t in pairs.items()) > 3
    assert all("US-Dollar" in t for s, t in pairs.items() if "US dollar" in s)
    assert max(map(len, pairs)) < 120
    assert 12 <= sorted(map(len, pairs))[len(pairs) // 2] <= 40


def test_digits_agree_where_the_form_is_the_same(corpus):
    """Decimals, measures and named amounts show the same digits on both sides."""

    def digits(text: str) -> str:
        return "".join(c for c in text if c in "0123456789")  # not the 2 of km²

    compared = Counter()
    for text in (corpus.train, corpus.held_out):
        for source, target, kind in zip(text.source, text.target, text.kinds, strict=True):
            if kind in ("unit", "relative"):
                assert digits(source) == digits(target), (source, target)
            elif kind in ("number", "currency") and not source.rstrip("0123456789").endswith("K"):
                assert digits(source) in digits(target), (source, target)
            else:
                continue
            compared[kind] += 1
    assert compared.keys() == {"unit", "relative", "number", "currency"}
    assert min(compared.values()) > 100, compared


@pytest.mark.parametrize(
    "corpus_name", ["cldr:de-en", "cldr:en-ja", "cldr:zh_Hant-ru", "cldr:pt_BR-ar", "cldr:fr-en", "cldr:en-en_GB"]
)
def test_other_locales(corpus_name):
    corpus = build(corpus_name, train_pairs=800, held_out_per_kind=10, valid_per_kind=5)
    assert corpus.name == corpus_name
    assert len(corpus.train) == 800
    assert set(corpus.held_out.kinds) == set(KINDS)
    for text in (corpus.train, corpus.held_out):
        assert all(s.strip() and t.strip() and "\n" not in s + t for s, t in zip(text.source, text.target, strict=True))


def test_write_and_read_back(corpus, tmp_path):
    written = write(corpus, tmp_path / "new" / "folder")
    assert sorted(path.name for path in written) == sorted(
        f"{name}.{end}" for name in ("train", "valid", "heldout") for end in ("en", "de", "kinds")
    )
    folder = tmp_path / "new" / "folder"
    back = read_parallel(folder / "heldout.en", folder / "heldout.de")
    assert (back.source, back.target, back.digests) == (
        corpus.held_out.source, corpus.held_out.target, corpus.held_out.digests,
    )  # fmt: skip
    assert read_lines(folder / "heldout.kinds") == corpus.held_out.kinds


def test_kind_weights():
    corpus = build(train_pairs=400, held_out_per_kind=4, valid_per_kind=0, kind_weights={"date": 5, "language": 0})
    assert "language" not in set(corpus.train.kinds) | set(corpus.held_out.kinds)
    assert Counter(corpus.train.kinds).most_common(1)[0][0] == "date"
    assert len(corpus.valid) == 0
    for weights, message in (
        ({"dates": 1.0}, "no kind 'dates'"),
        ({"date": -1.0}, "date -1"),
        ({"date": float("nan")}, "date nan"),
        (dict.fromkeys(KINDS, 0.0), "all are 0"),
    ):
        with pytest.raises(UserError, match=message):
            build(train_pairs=100, kind_weights=weights)


@pytest.mark.parametrize(
    ("corpus_name", "message"),
    [
        ("en-de", "expected cldr:SRC-TGT"),
        ("cldr:en", "expected cldr:SRC-TGT"),
        ("cldr:en-", "expected cldr:SRC-TGT"),
        ("cldr:pt-BR-en", "joined by _"),
        ("cldr:en-en", "same locale"),
        ("cldr:xx-qq", "no locale 'xx'.*no locale 'qq'"),
        ("cldr:en-pt_BT", "did you mean .*pt_"),
        ("cldr:en-jbo", "name only 0 of kind territory"),
    ],
)
def test_bad_names_are_refused_in_one_line(corpus_name, message):
    with pytest.raises(UserError, match=message) as caught:
        build(corpus_name, train_pairs=500)
    assert "\n" not in str(caught.value)


def test_impossible_sizes_are_refused(monkeypatch):
    with pytest.raises(UserError, match="train_pairs is 0"):
        build(train_pairs=0)
    with pytest.raises(UserError, match="valid_per_kind is -1"):
        build(train_pairs=10, valid_per_kind=-1)
    monkeypatch.setattr(measures, "MIXED_SPANS", ((("week", 12), ("day", 6)),))  # few phrases of the kind are left
    monkeypatch.setattr(measures, "SPAN_LIMITS", {"day": 30})
    relative = dict.fromkeys(KINDS, 0.0) | {"relative": 1.0}
    with pytest.raises(UserError, match="different training pairs exist"):
        build(train_pairs=5000, held_out_per_kind=1, kind_weights=relative)
    with pytest.raises(UserError, match="to set aside, 2050 are needed"):
        build(train_pairs=10, held_out_per_kind=2000, kind_weights=relative)


def test_intervals_are_true(corpus):
    """The English interval, read back, starts and ends as the German one does."""
    months = {name.rstrip("."): m for m, name in EN.months["format"]["abbreviated"].items()}
    german = {name.rstrip("."): m for m, name in DE.months["format"]["abbreviated"].items()}
    checked = 0
    for source, target, kind in zip(corpus.train.source, corpus.train.target, corpus.train.kinds, strict=True):
        words = source.replace("\u2009", " ").replace(",", "").split()
        if kind == "interval" and len(words) == 6 and words[0] in months and words[3] in months and words[2] == "–":
            first, last = (datetime.date(int(words[5]), months[words[i]], int(words[i + 1])) for i in (0, 3))
            pieces = target.replace("\u2009", " ").replace("–", " ").replace(".", " ").split()
            assert pieces[0] == str(first.day)
            assert german[pieces[1]] == first.month
            assert pieces[2] == str(last.day)
            assert german[pieces[3]] == last.month
            assert pieces[4] == words[5]
            assert first < last
            checked += 1
    assert checked > 20
