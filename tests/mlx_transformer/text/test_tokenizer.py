"""Tokenizer: exact round trip, fixed ids, determinism, bounded time, and files that are refused."""

import json
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import MIN_VOCAB_SIZE, Tokenizer

LINES = [
    f"{greeting}, {name}! On March {day}, {1990 + day} it took {day * 37}\u202fkm und {day}\u00a0°C für Ärger."
    for day in range(1, 29)
    for name in ("Anna", "Jürgen", "Zoë")
    for greeting in ("Hello", "Guten Tag")
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, vocab_size=300)


TROUBLE = [
    *" \u00a0\u202f\u2009\t\n\r\x00\x1f\x7f\u0301\u200d\ufeff\u2028\u0085\ufffd▁Ġ</s>09½²٣",
    "👩‍👩‍👧",
    "🇩🇪",
    "\U0010ffff",
]
awkward = st.lists(st.one_of(st.sampled_from(TROUBLE), st.characters(exclude_categories=["Cs"]))).map("".join)


@given(awkward)
@settings(max_examples=60, deadline=None)
def test_round_trip_is_exact(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_id
    assert min(ids[:-1], default=4) >= 4


@pytest.mark.parametrize("text", ["", " ", "  a  b  ", "\u0301", "a\r\nb\n", "x\u2028y", "<pad><s></s><unk>", "5</s>6"])
def test_round_trip_of_known_troublemakers(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_and_bytes_are_fixed(tokenizer):
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert [tokenizer.token(i) for i in range(4)] == ["<pad>", "<s>", "</s>", "<unk>"]
    assert all(len(tokenizer.token(i)) == 1 for i in range(4, MIN_VOCAB_SIZE))
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.token(MIN_VOCAB_SIZE)) == 2
    with pytest.raises(UserError, match="300"):
        tokenizer.token(300)


def test_special_token_strings_in_text_are_text(tokenizer):
    ids = tokenizer.encode("</s>")
    assert len(ids) > 2
    assert ids.count(tokenizer.eos_id) == 1


def test_every_digit_is_a_token_of_its_own(tokenizer):
    ids = {digit: tokenizer.encode(digit)[0] for digit in "0123456789"}
    assert len(set(ids.values())) == 10
    assert tokenizer.encode("90210")[:-1] == [ids[d] for d in "90210"]
    for text in ("a 42", "(42)", "\u00a042", "x42y"):
        assert [i for i in tokenizer.encode(text) if i in ids.values()] == [ids["4"], ids["2"]]


def test_decode_drops_special_tokens_and_survives_broken_bytes(tokenizer):
    ids = tokenizer.encode("Ärger")
    assert tokenizer.decode([1, *ids, 0, 0]) == "Ärger"
    half = tokenizer.encode("👩")[:1]
    assert tokenizer.decode(half) == "\ufffd"
    assert tokenizer.decode_batch([ids, [2], []]) == ["Ärger", "", ""]


def test_training_ignores_the_order_of_lines_and_the_process(tokenizer):
    shuffled = random.Random(3).sample(LINES, len(LINES))
    assert Tokenizer.train(shuffled, vocab_size=300).fingerprint == tokenizer.fingerprint
    script = (
        "from mlx_transformer.text.tokenizer import Tokenizer;"
        f"print(Tokenizer.train({LINES!a}, vocab_size=300).fingerprint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == tokenizer.fingerprint


def test_more_merges_keep_the_first_ones(tokenizer):
    larger = Tokenizer.train(LINES, vocab_size=310)
    assert [larger.token(i) for i in range(300)] == [tokenizer.token(i) for i in range(300)]
    assert larger.fingerprint != tokenizer.fingerprint


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.encode_batch([*LINES[:9], "</s>"]) == tokenizer.encode_batch([*LINES[:9], "</s>"])
    assert loaded.to_json() == tokenizer.to_json()


def test_file_has_standard_components_only(tokenizer):
    specification = json.loads(tokenizer.to_json())
    assert specification["normalizer"] is None
    assert [p["type"] for p in specification["pre_tokenizer"]["pretokenizers"]] == ["Split", "ByteLevel"]
    assert specification["decoder"]["type"] == "ByteLevel"
    assert specification["post_processor"]["type"] == "TemplateProcessing"


@pytest.mark.parametrize("word", ["a", "ä", " ", "!", "\u0301", "a1", "日"])
def test_a_long_text_without_a_break_comes_back(tokenizer, word):
    text = word * (250_000 // len(word.encode()))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # Without the cap on a word's length each of these would take many minutes.


def test_lone_surrogates_are_refused_with_their_place(tokenizer):
    with pytest.raises(UserError, match=r"text 2 .*character 3"):
        tokenizer.encode_batch(["fine", "ab\ud800"])
    with pytest.raises(UserError, match=r"text 1 .*character 1"):
        Tokenizer.train(["\udfff"], vocab_size=300)


@pytest.mark.parametrize("text", [None, ["a"], ("a", "b"), 3, b"a"])
def test_what_is_no_text_is_named(tokenizer, text):
    kind = type(text).__name__
    with pytest.raises(UserError, match=f"text 1: must be text, not {kind}"):
        tokenizer.encode(text)
    with pytest.raises(UserError, match=f"text 2: must be text, not {kind}"):
        tokenizer.encode_batch(["a", text])


def test_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(UserError, match="260"):
        Tokenizer.train(LINES, vocab_size=259)


def test_little_text_gives_a_smaller_vocabulary():
    small = Tokenizer.train(["ab ab"], vocab_size=1000)
    assert MIN_VOCAB_SIZE < small.vocab_size < 270


def _broken(change):
    specification = json.loads(Tokenizer.train(["a b"], vocab_size=300).to_json())
    change(specification)
    return json.dumps(specification)


def _hostile_pattern(specification):
    specification["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$"


def _other_special_ids(specification):
    specification["model"]["vocab"].update({"<s>": 2, "</s>": 1})
    for token in specification["added_tokens"]:
        token["id"] = {1: 2, 2: 1}.get(token["id"], token["id"])


def _no_eos(specification):
    specification["post_processor"] = None


def _prefix(specification):
    specification["model"]["continuing_subword_prefix"] = "12"


def _chance(specification):
    specification["model"]["dropout"] = 0.1


def _gap(specification):
    specification["model"]["vocab"]["zzz"] = 5000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ('{"model"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a tokenizer.json"),
        ("{}", "not a tokenizer.json"),
        ('{"model": {}}', "cannot|can read"),
        (_broken(_hostile_pattern), "regular expression"),
        (_broken(_other_special_ids), "<s> has id 2"),
        (_broken(_no_eos), "doesn't end"),
        (_broken(_gap), "gaps"),
        (_broken(_prefix), "continuing_subword_prefix='12'"),
        (_broken(_chance), "dropout=0.1"),
    ],
    ids=["empty", "cut", "nested", "list", "object", "model", "regex", "ids", "eos", "gap", "prefix", "chance"],
)
def test_broken_files_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_ends_a_thread_of_the_library_is_refused_too(monkeypatch):
    """Such errors are no Exception. Others pass."""

    class PanicException(BaseException):
        pass

    for error, expected in ((PanicException("out of range"), UserError), (KeyboardInterrupt(), KeyboardInterrupt)):
        monkeypatch.setattr("tokenizers.Tokenizer", _Raises(error))
        with pytest.raises(expected):
            Tokenizer('{"model": {}}')


class _Raises:
    def __init__(self, error):
        self.error = error

    def from_str(self, text):
        raise self.error


def test_missing_and_binary_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        Tokenizer.load(tmp_path)
