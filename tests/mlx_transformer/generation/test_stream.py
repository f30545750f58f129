"""Streaming: the tokens and the text of `generate` and `translate`, in pieces that are whole characters."""

from __future__ import annotations

import io
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from combined import slow, thinned
from makers_tokenizers import SPECIAL, makers_json
from toy_model import Toy

from export import OnnxTransformer, export_onnx
from export.__main__ import main
from mlx_transformer import load
from mlx_transformer.decoding.search import generate
from mlx_transformer.generation.stream import pieces, stream_ids
from mlx_transformer.runtime.decoding import MlxArrays
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu_path

LINES = ["one two", "", "  ", "three. four five six!", "größer, 東京 🎉", "x"]
REQUESTS = [
    {},
    {"max_new_tokens": 1},
    {"min_new_tokens": 6, "max_new_tokens": 9},
    {"sample": True, "seed": 3, "temperature": 1.5, "top_k": 50},
]


@pytest.fixture(scope="module")
def cpu(text_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("cpu") / "onnx"
    return OnnxTransformer(export_onnx(text_folder / "model", out, target="cpu"), threads=2)


@pytest.fixture(scope="module")
def mlx(text_folder):
    return load(text_folder / "model")[0]


@pytest.mark.parametrize("arrays", [None, MlxArrays()], ids=["numpy", "mlx"])
def test_ids_are_those_of_generate(arrays):
    toy = Toy(vocab_size=20, eos_bias=1.0, arrays=arrays)
    for row in ([5, 2], [7, 8, 2], [2]):
        for prefix in ([], [9, 4]):
            for request in (*REQUESTS, {"max_new_tokens": 2}):
                if request.get("max_new_tokens", 99) < len(prefix):
                    continue
                expected = generate(toy, [row], [prefix], **request)[0]
                assert list(stream_ids(toy, row, prefix, **request)) == expected


def test_row_decides_what_is_drawn():
    toy = Toy(vocab_size=20)
    request = {"sample": True, "max_new_tokens": 8}
    all_rows = generate(toy, [[5, 2]] * 3, **request)
    assert [list(stream_ids(toy, [5, 2], row=i, **request)) for i in range(3)] == all_rows
    assert all_rows[0] != all_rows[1]


def test_a_token_costs_one_step_and_the_first_none():
    toy = Toy(vocab_size=20)
    stream = stream_ids(toy, [5, 2], min_new_tokens=5, max_new_tokens=5)
    assert toy.steps == 0
    for steps in range(5):
        next(stream)
        assert toy.steps == steps
    assert list(stream) == []
    assert toy.steps == 4


@pytest.mark.fast("request_0", "request_2", "request_1")
@pytest.mark.parametrize("request_", REQUESTS)
def test_text_is_that_of_translate(text_model, cpu, mlx, request_):
    for model in (text_model, cpu, mlx):
        for line in LINES if model is text_model else LINES[3:5]:
            got = list(model.stream(line, **request_))
            assert "".join(got) == model.translate([line], **request_)[0]
            assert all(got), "an empty piece"


def test_split_lines_are_joined_as_translate_does(text_model):
    line = "one two three. four five six! " * 12
    request = {"overlong": "split", "max_new_tokens": 3}
    assert "".join(text_model.stream(line, **request)) == text_model.translate([line], **request)[0]
    assert "".join(text_model.stream(line, overlong="truncate")) == text_model.translate([line], overlong="truncate")[0]


def test_errors_come_at_the_call(text_model, mlx):
    toy = Toy(vocab_size=20)
    for model in (text_model, mlx):
        with pytest.raises(UserError, match=r"beam=4 .* beam=1"):
            model.stream("one", beam=4)
        with pytest.raises(UserError, match=r"top_k=5 .* sample=True"):
            model.stream("one", top_k=5)
        with pytest.raises(UserError, match=r"line 7: .* the model takes at most 60"):
            model.stream("one " * 200, line_number=7)
    with pytest.raises(UserError, match="outside the vocabulary"):
        stream_ids(toy, [99])
    toy.table[:] = np.nan
    with pytest.raises(UserError, match="not finite"):
        list(stream_ids(toy, [5, 2]))


def test_mlx_model_returns_to_its_mode(mlx):
    mlx.train()
    ids = mlx.stream_ids([5, 2], min_new_tokens=3, max_new_tokens=4)
    next(ids)
    assert not mlx.training
    ids.close()
    assert mlx.training
    mlx.eval()


def test_pieces_are_whole_characters():
    """Random bytes, valid and broken: joined they are the whole text, and no character is given in halves."""
    tokenizer = Tokenizer.train(["größer 東京 🎉🎉 " * 5], vocab_size=290)
    random_ = random.Random(1)
    assert tokenizer.decodes_in_parts
    texts = ["", "größer", "東京🎉é\u0301", "a\ufffdb\ufffd", "👩‍👩‍👧"]
    rows = [tokenizer.encode(text)[:-1] for text in texts]
    rows += [[random_.randrange(4, tokenizer.vocab_size) for _ in range(30)] for _ in range(200)]
    rows += [tokenizer.encode("🎉")[:-1][:1] * k for k in range(4)]
    for row in rows:
        got = list(pieces(tokenizer, row))
        assert "".join(got) == tokenizer.decode(row)
        assert len(row) <= len(got) <= len(row) + 1  # one for each id, then what stays incomplete
    # Every byte a token: three tokens, one character, one piece.
    bytes_ = [next(i for i in range(4, 260) if tokenizer.token(i) == letter) for letter in "æĿ±"]
    assert list(pieces(tokenizer, bytes_)) == ["", "", "東"]


class Counting:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer):
        self.own, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.own, name)

    def decode(self, ids):
        self.decoded += len(ids)
        return self.own.decode(ids)


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_published_decoder_s_pieces_in_linear_time(kind):
    """Any ids, among them control tokens, ids of no token, and runs of bytes: valid, broken, and broken at the end."""
    tokenizer, random_ = Tokenizer(makers_json(kind)), random.Random(2)
    assert tokenizer.decodes_in_parts
    texts = [" the cat  sat", "東京タワー 🎉🎉 größer", "a\ufffd b", "👩‍👩‍👧‍👦\u0915\u094d"]
    bytes_ = sorted(tokenizer.byte_ids) or range(tokenizer.vocab_size)
    rows = [tokenizer.encode(text)[: len(text) + cut] for text in texts for cut in (-1, 0, 99)]
    for _ in range(40):
        drawn = [random_.randrange(tokenizer.vocab_size + 3) for _ in range(20)]
        drawn[5:5] = tokenizer.encode(random_.choice(texts))[random_.randrange(3) :]
        rows += [drawn, [*drawn, *random_.choices(bytes_, k=3)]]
    for row in rows:
        got = list(pieces(tokenizer, row))
        assert "".join(got) == tokenizer.decode(row)
        assert len(row) <= len(got) <= len(row) + 1  # one for each id, then what stays incomplete
    for ids in ([bytes_[255]] * 2000, tokenizer.encode("the cat, 東京 " * 200), random_.choices(range(380), k=2000)):
        counting = Counting(tokenizer)
        assert "".join(pieces(counting, ids)) == tokenizer.decode(ids)
        assert counting.decoded < 70 * len(ids)


def test_a_first_space_that_is_dropped():
    """Tokenizers that mark words by a space in front drop the first one: what was given must stay what it was."""
    words = ["▁one", "▁two", "▁three"]
    decode = lambda ids: "".join(words[i] for i in ids).replace("▁", " ").strip()  # noqa: E731
    tokenizer = SimpleNamespace(decode=decode, decodes_in_parts=False)
    assert list(pieces(tokenizer, [0, None, 1, 2])) == ["one", "", " two", " three"]


def test_command_line(text_folder, capsysbinary, monkeypatch, text_model):
    text = "one two\n\nthree. four\n"
    for arguments in ([], ["--sample", "--seed", "5"]):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        assert main(["translate", str(text_folder / "onnx"), "--threads", "1", "--stream", *arguments]) == 0
        options = {"sample": True, "seed": 5} if arguments else {}
        expected = [text_model.translate([line], **options)[0].replace("\n", " ") for line in text.splitlines()]
        assert capsysbinary.readouterr().out.decode() == "".join(f"{line}\n" for line in expected)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert main(["translate", str(text_folder / "onnx"), "--stream", "--beam", "2"]) == 2
    assert b"stream with --beam 1" in capsysbinary.readouterr().err


@slow
@pytest.mark.parametrize("target", thinned(["cpu", "portable"], 2))
def test_threads_share_one_model(text_folder, tmp_path, target):
    """Eight threads at once, every kind of call: what each gets is what it gets alone."""
    onnx = OnnxTransformer(export_onnx(text_folder / "model", tmp_path / "onnx", target=target), threads=1)
    random_ = random.Random(2)
    words = "one two three four five six größer".split()
    lines = [" ".join(random_.choices(words, k=random_.randint(1, 9))) for _ in range(12)]
    requests = [{}, {"beam": 3}, {"sample": True, "seed": 1}, {"max_new_tokens": 5}]
    jobs = [(lines[i : i + 4], request) for i in range(0, len(lines), 4) for request in requests]

    def work(job):
        part, request = job
        streamed = [] if "beam" in request else ["".join(onnx.stream(part[0], **request))]
        return onnx.translate(part, **request), onnx.n_best(part, **request), streamed

    in_turn = [work(job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, jobs))
    assert together == in_turn
