"""OpenAI's forms: completions by a decoder alone, whole and streamed, counted, refused as its clients read it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from serving import client
from small_models import DECODER, write_text_model

from export import OnnxTransformer
from export.serve.completing import Written
from export.serve.models import Named
from mlx_transformer.generation.stream import NewToken, until

COMPLETIONS = "/v1/completions"
GREEDY = {"model": "stories", "temperature": 0}
PROMPTS = ["one two", "", "größer, 東京", "three. four"]


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A decoder with random weights in ONNX Runtime."""
    folder = write_text_model(tmp_path_factory.mktemp("decoder"), **DECODER)
    return OnnxTransformer(folder / "onnx", threads=1)


@pytest.fixture(scope="module")
def shared(writer, text_model):
    models = dict(zip(Named.of(["stories=a", "en-de=b"]), [writer, text_model], strict=True))
    with client(models) as (http_, _):
        yield http_


def counts(writer, prompts, texts_ids):
    given = sum(len(ids) - 1 for ids in writer.tokenizer.encode_batch(prompts))
    new = sum(map(len, texts_ids))
    return {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}


def greedy_ids(writer, prompts, most):
    rows = [[writer.config.bos_id, *ids[:-1]] for ids in writer.tokenizer.encode_batch(prompts)]
    return writer.generate(rows, max_new_tokens=most)


def test_greedy_completions_are_those_of_generate(shared, writer):
    for prompts, most in ((PROMPTS, 12), (["one two"], 16), (PROMPTS[:2], 1)):
        body = {**GREEDY, "prompt": prompts, "max_tokens": most}
        answer = shared.post(COMPLETIONS, json=body).json()
        ids = greedy_ids(writer, prompts, most)
        assert [choice["text"] for choice in answer["choices"]] == writer.complete(prompts, max_new_tokens=most)
        assert answer["usage"] == counts(writer, prompts, ids)
        reasons = ["length" if len(found) == most else "stop" for found in ids]
        assert [choice["finish_reason"] for choice in answer["choices"]] == reasons
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
        assert (answer["object"], answer["model"]) == ("text_completion", "stories")
    assert len(ids[0]) == 1
    usual = shared.post(COMPLETIONS, json={**GREEDY, "prompt": "one two"}).json()
    assert usual["choices"][0]["text"] == writer.complete("one two", max_new_tokens=16)
    guessed = shared.post(COMPLETIONS, json={**GREEDY, "prompt": "one two", "speculate": 3}).json()
    assert guessed["choices"] == usual["choices"]


def test_a_prompt_may_be_ids(shared, writer):
    """Without a start token: as the tokenizer has a text."""
    rows = [ids[:-1] for ids in writer.tokenizer.encode_batch(PROMPTS) if len(ids) > 1]
    for prompt in (rows, rows[0]):
        expected = shared.post(COMPLETIONS, json={**GREEDY, "prompt": writer.tokenizer.decode_batch(rows)}).json()
        found = shared.post(COMPLETIONS, json={**GREEDY, "prompt": prompt}).json()
        count = len(rows) if prompt is rows else 1
        assert found["choices"] == expected["choices"][:count]
        assert found["usage"]["prompt_tokens"] == sum(map(len, rows[:count]))
    streamed = shared.post(COMPLETIONS, json={**GREEDY, "prompt": rows[0], "stream": True}).text
    parts = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts) == found["choices"][0]["text"]


def test_drawn_completions(shared, writer):
    drawn = {"temperature": 1.3, "top_p": 0.9, "seed": 4}
    body = {"model": "stories", "prompt": "one two", "n": 3, "max_tokens": 9, **drawn}
    found = [choice["text"] for choice in shared.post(COMPLETIONS, json=body).json()["choices"]]
    assert found == writer.complete(["one two"] * 3, max_new_tokens=9, sample=True, **drawn)
    assert len(set(found)) > 1
    free = {"model": "stories", "prompt": "one two", "max_tokens": 30}  # another seed each time
    assert len({shared.post(COMPLETIONS, json=free).json()["choices"][0]["text"] for _ in range(3)}) > 1


def test_stop(shared, writer):
    wholes = {prompt: writer.complete(prompt, max_new_tokens=30) for prompt in PROMPTS}
    prompt, whole = max(wholes.items(), key=lambda each: len(set(each[1])))
    stop = whole[len(whole) // 2 :][:2]
    assert len(stop) == 2
    for body in ({"stop": stop}, {"stop": ["nowhere", stop]}, {"stop": stop, "stream": True}):
        answer = shared.post(COMPLETIONS, json={**GREEDY, "prompt": prompt, "max_tokens": 30, **body})
        if "stream" in body:
            choices = [event["choices"][0] for event in events(answer)]
            text, reason = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
        else:
            [choice] = answer.json()["choices"]
            text, reason = choice["text"], choice["finish_reason"]
        assert (text, reason) == ("".join(until([whole], [stop])), "stop")


def events(answer):
    """What a stream says before its [DONE]."""
    *found, done, nothing = answer.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_is_what_the_whole_is(shared, prompt):
    for more in ({"temperature": 0}, {"seed": 3, "top_k": 9, "temperature": 0.8}):
        body = {"model": "stories", "prompt": prompt, "max_tokens": 12, **more}
        whole = shared.post(COMPLETIONS, json=body).json()
        answer = shared.post(COMPLETIONS, json={**body, "stream": True, "stream_options": {"include_usage": True}})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *parts, last = events(answer)
        choices = [choice for part in parts for choice in part["choices"]]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(choices) - 1) + [whole["choices"][0]["finish_reason"]]
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert {part["usage"] for part in parts} == {None}
        assert len({part["id"] for part in [*parts, last]}) == 1
        assert "usage" not in events(shared.post(COMPLETIONS, json={**body, "stream": True}))[0]


def test_streams_side_by_side_are_those_alone(shared):
    """More of them than a thread takes at once, among whole answers; each ends with its own count."""
    bodies = [
        {"model": "stories", "prompt": PROMPTS[i % 4], "max_tokens": 5 + i, "seed": i, "n": 1 + i % 2, **more}
        for i in range(12)
        for more in ({"temperature": 0}, {"presence_penalty": 1})
    ]
    alone = [shared.post(COMPLETIONS, json=body).json() for body in bodies]

    def ask(body):
        told = {"stream": True, "stream_options": {"include_usage": True}} if body["seed"] % 3 else {}
        return shared.post(COMPLETIONS, json={**body, **told})

    with ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(ask, bodies)]
    for body, answer, expected in zip(bodies, answers, alone, strict=True):
        if body["seed"] % 3 == 0:
            assert answer.json()["choices"] == expected["choices"]
            continue
        *parts, last = events(answer)
        texts = ["" for _ in range(body["n"])]
        for part in parts:
            texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
        assert texts == [choice["text"] for choice in expected["choices"]]
        assert last["usage"] == expected["usage"]


def test_models(shared):
    entries = shared.get("/v1/models").json()
    assert (entries["object"], [entry["id"] for entry in entries["data"]]) == ("list", ["stories", "en-de"])
    assert shared.get("/v1/models/stories").json() == entries["data"][0]
    error = shared.get("/v1/models/gpt").json()["error"]
    assert error["code"] == "model_not_found"
    assert "stories, en-de" in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, '"model" and "prompt" are needed'),
        ({"prompt": "x"}, 400, '"model" and "prompt" are needed'),
        ({"model": "stories"}, 400, '"model" and "prompt" are needed'),
        ({"model": "gpt", "prompt": "x"}, 404, "there is no 'gpt'; there are stories, en-de"),
        ({"model": "en-de", "prompt": "x"}, 400, "en-de is a translator; send its text to /translate"),
        ({**GREEDY, "prompt": [1, "x"]}, 400, "prompt: must be a string or a list"),
        ({**GREEDY, "prompt": [[1], []]}, 400, "prompt: a row of ids must be a list of at least one"),
        ({**GREEDY, "prompt": [[5], [9**9]]}, 400, "prompt row 1, position 0: id 387420489 is outside the vocabulary"),
        ({**GREEDY, "prompt": [10**40]}, 400, "prompt row 0"),
        ({**GREEDY, "prompt": [5] * 99}, 400, "tokens"),
        ({**GREEDY, "prompt": []}, 400, "prompt: must hold at least one text, or one row of ids"),
        ({**GREEDY, "prompt": "x", "max_tokens": 0}, 400, "max_tokens: must be a whole number of at least 1"),
        ({**GREEDY, "prompt": "x", "max_tokens": 61}, 400, "max_tokens=61: this server takes at most 60"),
        ({**GREEDY, "prompt": "x " * 50}, 400, "tokens"),
        ({**GREEDY, "prompt": "x", "n": 65}, 400, "n: must be a whole number of at least 1, at most 64"),
        ({**GREEDY, "prompt": ["x"] * 30, "n": 2}, 413, "60 outputs, at most 48"),
        ({**GREEDY, "prompt": "x", "best_of": 2}, 400, "best_of: all outputs are given"),
        ({**GREEDY, "prompt": "x", "echo": True}, 400, "echo: this server doesn't have it"),
        ({**GREEDY, "prompt": "x", "logprobs": 21}, 400, "logprobs: must be a whole number of at least 0, at most 20"),
        ({**GREEDY, "prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias: this server doesn't have it"),
        ({**GREEDY, "prompt": "x", "presence_penalty": 3}, 400, "presence_penalty=3 must be"),
        ({**GREEDY, "prompt": "x", "min_p": 2}, 400, "min_p=2 must be"),
        ({**GREEDY, "prompt": "x", "beam": 2}, 400, "'beam': no such setting"),
        ({**GREEDY, "prompt": "x", "stop": [""]}, 400, "stop: an empty word ends no text"),
        ({**GREEDY, "prompt": "x", "seed": -1}, 400, "seed=-1 must be"),
        ({"model": "stories", "prompt": "x", "temperature": -1}, 400, "temperature=-1 must be"),
        ({**GREEDY, "prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({**GREEDY, "prompt": "x", "user": 3}, 400, "user: must be a string"),
        ({**GREEDY, "prompt": "x", "stream": 1}, 400, "stream: must be true or false"),
    ],
)
def test_what_is_refused(shared, body, status, message):
    answer = shared.post(COMPLETIONS, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, message in error["message"]) == (status, True), answer.text
    assert error["type"] == "invalid_request_error"


def test_what_changes_nothing_may_be_said(shared):
    said = {"n": 1, "best_of": 1, "echo": False, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}}
    said |= {"logprobs": None, "suffix": None, "stop": None, "user": None, "stream": False}
    asked = ({}, said, {"user": "someone"})
    plain, *others = [shared.post(COMPLETIONS, json={**GREEDY, "prompt": "x", **more}).json() for more in asked]
    assert all(plain["choices"] == other["choices"] for other in others)


def test_a_server_without_translator(writer):
    with client({Named.of(["stories=a"])[0]: writer}) as (http_, _):
        answer = http_.post("/translate", json={"text": "x"})
        assert answer.status_code == 400
        assert "POST /v1/chat/completions, /v1/completions, " in answer.json()["error"]


def test_unknown_addresses_and_faults(shared, writer):
    for path in ("/v1/chat", "/v1/completions/"):
        answer = shared.post(path, json={**GREEDY, "prompt": "x"}, follow_redirects=False)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (404, "invalid_request_error")
        assert "POST /v1/completions and /v1/chat/completions to decoders" in error["message"]

    class Broken:
        config, tokenizer, generation = writer.config, writer.tokenizer, {}
        has_steps, depends_on_batch = True, False

        def generate(self, ids, **options):
            raise RuntimeError("cable")

        def stream_tokens(self, ids, **options):
            yield NewToken(9)
            raise RuntimeError("cable")

    with client({Named.of(["stories=a"])[0]: Broken()}) as (http_, _):
        answer = http_.post(COMPLETIONS, json={**GREEDY, "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        streamed = http_.post(COMPLETIONS, json={**GREEDY, "prompt": "x", "stream": True})
        assert json.loads(streamed.text.split("data: ")[-1])["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("stop", "text", "tokens", "reason"),
    [
        ([], "abcabc", 6, "length"),
        (["bc"], "a", 3, "stop"),
        (["bx", "ca"], "ab", 4, "stop"),
        (["x"], "abcabc", 6, "length"),
    ],
)
def test_tokens_behind_a_stop_word_are_not_counted(stop, text, tokens, reason):
    written = Written(6)
    pieces = list(written.follow(SimpleNamespace(decode="".join, decodes_in_parts=False), "abcabc", stop))
    assert ("".join(pieces), written.text, written.tokens, written.finish_reason) == (text, text, tokens, reason)


def test_a_stop_word_in_the_last_piece_is_one():
    """Bytes that are no character come at the end alone."""
    written = Written(3)
    tokenizer = SimpleNamespace(decode=lambda ids: "\ufffd" * len(ids), decodes_in_parts=False)
    assert list(written.follow(tokenizer, [1, 2, 3], ["\ufffd\ufffd"])) == ["", "", ""]
    assert written.finish_reason == "stop"
