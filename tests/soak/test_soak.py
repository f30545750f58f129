"""The soak's verdict: what ends with 1; and what it asks is what it means to ask."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mix
import pytest
import soak
from serving import client

from export import OnnxTransformer
from export.serve.models import Named

GOOD = {
    "capacity": 9.0,
    "counts": {"plain": 3, "accepted": 2, "refused": 1},
    "seconds": [0.1, 0.2],
    "health": [(150.0, 0.01), (99.0, 5.0)],
}


def told(result, memory, said=()):
    server = SimpleNamespace(lives=[[50.0], memory], said=list(said), excused=lambda moment: moment < 100)
    return soak.report(server, {**GOOD, "cut": [], "wrong": [], **result}, 0)


def test_what_is_good():
    assert told({"cut": [99.0]}, [100.0] * 40 + [109.0] * 40) == 0


@pytest.mark.parametrize(
    ("result", "memory", "said"),
    [
        ({"wrong": ["x: 200"]}, [100.0] * 9, ()),
        ({"cut": [100.0]}, [100.0] * 9, ()),
        ({}, [100.0] * 40 + [200.0] * 40, ()),
        ({}, [100.0] * 9, ["ERROR a fault"]),
        ({"counts": {"unanswered": 1}}, [100.0] * 9, ()),
        ({"seconds": []}, [100.0] * 9, ()),
    ],
    ids=["wrong", "broken", "grown", "fault", "unanswered", "nothing"],
)
def test_what_is_not(result, memory, said, capsys):
    assert told(result, memory, said) == 1
    assert "wrong answers" in capsys.readouterr().out


def test_when_a_connection_may_break(tmp_path):
    server = soak.Server({"en-de": tmp_path}, tmp_path)
    server.down.append((1000.0, 1005.0))
    assert [server.excused(moment) for moment in (990.0, 999.0, 1003.0, 1006.0, 1010.0)] == [0, 1, 1, 1, 0]


@pytest.mark.slow
def test_requests_have_right_answers_and_odd_ones_are_odd(text_model, tmp_path):
    served = mix.models(tmp_path, Path(text_model.where))
    opened = {name: OnnxTransformer(path, threads=1) for name, path in served.items()}
    asked = mix.questions(opened, 14, seed=2)
    assert asked == mix.questions(opened, 14, seed=2)
    assert {each["path"] for each in asked} == {"/translate", mix.COMPLETIONS, mix.CHATS, mix.EMBEDDINGS}
    assert any("q" in each["body"] for each in asked)
    streamed = [each["path"] for each in asked if mix.may_stream(each["body"])]
    assert set(streamed) == {"/translate", mix.COMPLETIONS, mix.CHATS}
    loaded = dict(zip(Named.of([f"{name}=DIR" for name in opened]), opened.values(), strict=True))
    with client(loaded, max_queue=600) as (http_, _):
        for each in asked:
            found = http_.post(each["path"], json=each["body"]).json()
            assert mix.is_right(each["path"], found, each["answer"])
            assert not mix.is_right(each["path"], found, each["answer"][1:])
        for whole, status in mix.odd():
            start, _, body = whole.partition(b"\r\n\r\n")
            if start.startswith((b"POST", b"DELETE")) and status not in (401, 431):
                method, path = start.split()[:2]
                kind = {"Content-Type": "application/x-www-form-urlencoded"} if b"urlencoded" in start else {}
                answer = http_.request(method.decode(), path.decode(), content=body, headers=kind)
                assert answer.status_code == status
