"""OpenAI's chats: answers by the model's template, whole and streamed, drawn, scored, counted, refused."""

from __future__ import annotations

import json
import math
from datetime import date

import pytest
from chat_models import write_chat_model
from chat_templates import CONVERSATIONS, INJECTED
from serving import client

from export import OnnxTransformer
from export.serve.models import Named
from export.settings import ServeSettings
from mlx_transformer import load
from mlx_transformer.system.errors import UserError

pytest.importorskip("jinja2")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DATE = "2026-01-31"
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"}]
GREEDY = {"model": "chat", "messages": HELLO, "temperature": 0, "max_tokens": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("chat"), "qwen2")


@pytest.fixture(scope="module")
def model(folder):
    return OnnxTransformer(folder / "onnx", threads=1)


@pytest.fixture(scope="module")
def shared(model, tmp_path_factory):
    dated = write_chat_model(tmp_path_factory.mktemp("dated"), "llama3", seed=4)
    models = [model, OnnxTransformer(dated / "onnx", threads=1)]
    named = dict(zip(Named.of(["chat=a", "dated=b"]), models, strict=True))
    with client(named, ServeSettings(date=DATE)) as (http_, _):
        yield http_, models[1]


def said(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(answer):
    """What a stream says before its [DONE]."""
    *found, done, nothing = answer.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0, "max_tokens": 4}, {"max_new_tokens": 4}),
        ({"temperature": 0, "max_tokens": 99, "max_completion_tokens": 3}, {"max_new_tokens": 3}),
        ({"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7, "max_tokens": 20}, None),
        (
            {"seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "max_tokens": 20},
            None,
        ),
        ({"temperature": 0, "frequency_penalty": 2, "max_tokens": 30}, {"frequency_penalty": 2, "max_new_tokens": 30}),
        ({"temperature": 0, "speculate": 4, "max_tokens": 30}, {"max_new_tokens": 30}),
    ],
)
def test_answers_are_those_of_chat(shared, model, asked, options):
    """Whole, in pieces and with log-probabilities; the counts are those of the ids."""
    http_, _ = shared
    if options is None:
        options = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in asked.items()}
        options["sample"] = True
    body = {**{name: GREEDY[name] for name in ("model", "messages")}, **asked}
    whole = said(http_.post(CHAT, json=body))
    [choice] = whole["choices"]
    ids, given = model._chat_prompt(HELLO, dict(options))
    [new] = model.generate([ids], **given)
    assert choice["message"] == {"role": "assistant", "content": model.chat(HELLO, **options), "refusal": None}
    assert choice["finish_reason"] == ("length" if len(new) == given["max_new_tokens"] else "stop")
    assert (choice["index"], choice["logprobs"], whole["object"]) == (0, None, "chat.completion")
    counts = {"prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(ids) + len(new)}
    assert whole["usage"] == counts
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    first, *parts, last = events(http_.post(CHAT, json=streamed))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    choices = [part["choices"][0] for part in parts]
    assert "".join(each["delta"].get("content", "") for each in choices) == choice["message"]["content"]
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    assert (last["choices"], last["usage"], last["object"]) == ([], counts, "chat.completion.chunk")
    scored = said(http_.post(CHAT, json={**body, "logprobs": True}))
    assert scored["choices"][0]["message"] == choice["message"]
    assert [each["logprob"] for each in scored["choices"][0]["logprobs"]["content"]] == pytest.approx(
        model.log_probabilities([ids], [new])[0].tolist(), abs=1e-5
    )


def test_log_probabilities_name_the_likeliest(shared, model):
    """The same in pieces; of a greedy answer the first is its token. In completions by OpenAI's earlier form."""
    http_, _ = shared
    body = {**GREEDY, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    [choice] = said(http_.post(CHAT, json=body))["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == choice["message"]["content"]
    for each in content:
        likeliest = each.pop("top_logprobs")
        assert (likeliest[0], len(likeliest)) == (each, 3)
        assert likeliest[0]["logprob"] >= likeliest[1]["logprob"] >= likeliest[2]["logprob"]
        assert each["bytes"] in (None, list(each["token"].encode()))
    parts = [part["choices"][0] for part in events(http_.post(CHAT, json={**body, "stream": True}))]
    streamed = [each for part in parts for each in part["logprobs"]["content"]]
    assert [each["top_logprobs"][0] for each in streamed] == content
    z = model.token_logits([model.chat_ids(HELLO)])[0, -1].astype(float)
    assert content[0]["logprob"] == pytest.approx(z.max() - math.log(sum(math.exp(x) for x in z)), abs=1e-5)

    asked = {"model": "chat", "prompt": "the cat", "max_tokens": 5, "temperature": 0}
    plain, [choice] = (said(http_.post(COMPLETIONS, json={**asked, "logprobs": k}))["choices"] for k in (0, 2))
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"] == plain[0]["text"] == model.complete("the cat", max_new_tokens=5)
    [expected] = model.completions(["the cat"], scored=True, max_new_tokens=5)
    assert found["token_logprobs"] == plain[0]["logprobs"]["token_logprobs"]
    assert found["token_logprobs"] == pytest.approx(expected["token_log_p"], abs=1e-5)
    for token, log_p, top, place in zip(*(found[name] for name in found), strict=True):
        assert (top[token], max(top.values())) == (log_p, log_p)
        assert choice["text"][place:].startswith(token)
    streamed = events(http_.post(COMPLETIONS, json={**asked, "logprobs": 2, "stream": True}))
    for name, values in found.items():
        assert [x for part in streamed for x in part["choices"][0]["logprobs"][name]] == values


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_several_outputs(shared, model, path):
    """As many rows of one seed; each of a stream's pieces has the number of its output."""
    http_, _ = shared
    asked = {"model": "chat", "n": 3, "seed": 5, "max_tokens": 8}
    if path == CHAT:
        body, ids = {**asked, "messages": HELLO}, [model.chat_ids(HELLO)] * 3
    else:
        body, ids = {**asked, "prompt": ["the", "cat"]}, model.tokenizer.prompts(["the"] * 3 + ["cat"] * 3)
    outputs = model.generate(ids, sample=True, seed=5, max_new_tokens=8)
    whole = said(http_.post(path, json=body))
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in whole["choices"]]
    assert texts == [model.tokenizer.decode(output) for output in outputs]
    assert whole["usage"]["completion_tokens"] == sum(map(len, outputs))
    assert whole["usage"]["prompt_tokens"] == sum(map(len, ids)) // 3
    pieces, reasons = [""] * len(texts), {}
    for part in events(http_.post(path, json={**body, "stream": True})):
        [choice] = part["choices"]
        pieces[choice["index"]] += choice["delta"].get("content", "") if path == CHAT else choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert pieces == texts
    assert reasons == {i: choice["finish_reason"] for i, choice in enumerate(whole["choices"])}


def test_what_a_template_is_told(shared, model):
    """Tools, variables, calls as OpenAI's clients send them, texts in parts, the server's date; control tokens in a
    message are text."""
    http_, dated = shared

    def tokens(body):
        return said(http_.post(CHAT, json={**GREEDY, "max_tokens": 1, **body}))["usage"]["prompt_tokens"]

    tools = CONVERSATIONS["tools"]
    body = {"messages": tools.messages, "tools": tools.tools}
    assert tokens(body) == len(model.chat_ids(tools.messages, tools=tools.tools))
    assert tokens({**body, "tool_choice": "none"}) == len(model.chat_ids(tools.messages))
    variables = {"enable_thinking": False}
    assert tokens({"chat_template_kwargs": variables}) == len(model.chat_ids(HELLO, variables=variables))
    called = CONVERSATIONS["called"].messages
    as_sent = json.loads(json.dumps(called))
    function = as_sent[2]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert tokens({"messages": as_sent}) == len(model.chat_ids(called))
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Hi ", "there")]}]
    assert tokens({"messages": parts}) == len(model.chat_ids([{"role": "user", "content": "Hi there"}]))
    developer = [{**HELLO[0], "role": "developer"}, HELLO[1]]
    assert tokens({"messages": developer}) == tokens({})
    answer = said(http_.post(CHAT, json={**GREEDY, "messages": INJECTED.messages}))
    assert answer["choices"][0]["message"]["content"] == model.chat(INJECTED.messages, max_new_tokens=9)
    for day in (DATE, date.today().isoformat()):
        expected = dated.chat(HELLO[1:], date=day, max_new_tokens=12)
        found = said(http_.post(CHAT, json={**GREEDY, "model": "dated", "messages": HELLO[1:], "max_tokens": 12}))
        assert (found["choices"][0]["message"]["content"] == expected) == (day == DATE)


def test_stop(shared, model):
    http_, _ = shared
    whole = model.chat(HELLO, max_new_tokens=60)
    stop = whole[len(whole) // 2 :][:3]
    for body in ({"stop": stop}, {"stop": ["nowhere", stop], "stream": True}):
        answer = http_.post(CHAT, json={**GREEDY, "max_tokens": 60, **body})
        if "stream" in body:
            choices = [event["choices"][0] for event in events(answer)]
            text, reason = "".join(c["delta"].get("content", "") for c in choices), choices[-1]["finish_reason"]
        else:
            [choice] = said(answer)["choices"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == (whole[: whole.index(stop)], "stop")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "gpt"}, 404, "there is no 'gpt'"),
        ({"messages": None}, 400, '"model" and "messages" are needed'),
        ({"messages": []}, 400, "messages: must be a list of at least one object"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0].role: must be a string"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content: must be a string or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages[0].content: a part of type 'image_url': the model reads text alone",
        ),
        ({"messages": [{"role": "user", "content": "a " * 500}]}, 400, "tokens"),
        ({"max_tokens": 451}, 400, "max_tokens=451: this server takes at most 450"),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens: must be a whole number of at least 1"),
        ({"top_logprobs": 2}, 400, "top_logprobs: is for logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs: must be a whole number"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format: this server doesn't have it"),
        ({"tool_choice": "required"}, 400, "tool_choice: this server has auto and none"),
        ({"tools": {}}, 400, "tools: must be a list of objects"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias: this server doesn't have it"),
        ({"audio": {}}, 400, "'audio': no such setting; there are model, messages"),
        ({"prompt": "x"}, 400, "'prompt': no such setting"),
        ({"seed": -1}, 400, "seed=-1 must be"),
        ({"chat_template_kwargs": []}, 400, "chat_template_kwargs: must be an object"),
        ({"repetition_penalty": 0}, 400, "repetition_penalty=0 must be"),
    ],
)
def test_what_is_refused(shared, body, status, message):
    answer = shared[0].post(CHAT, json={**GREEDY, **body})
    error = answer.json()["error"]
    assert (answer.status_code, message in error["message"]) == (status, True), answer.text
    assert error["type"] == "invalid_request_error"


def test_what_changes_nothing_may_be_said(shared):
    http_, _ = shared
    neutral = {"response_format": {"type": "text"}, "logit_bias": {}, "service_tier": "auto", "store": False, "n": 1}
    neutral |= {"frequency_penalty": 0.0, "logprobs": False, "tools": [], "parallel_tool_calls": True, "user": "me"}
    neutral |= {"modalities": ["text"], "metadata": {}, "stop": None, "top_p": 1, "tool_choice": "auto"}
    plain, other = (said(http_.post(CHAT, json={**GREEDY, **more}))["choices"] for more in ({}, neutral))
    assert plain == other


def test_a_checkpoint_answers_alike(folder, model):
    with client({Named.of(["chat=a"])[0]: load(folder / "model")[0]}) as (http_, _):
        for more in ({}, {"temperature": 0.9, "seed": 2}):
            body = {**GREEDY, **more}
            found = said(http_.post(CHAT, json=body))["choices"][0]["message"]["content"]
            options = {"sample": True, **more} if more else {}
            assert found == model.chat(HELLO, max_new_tokens=9, **options)
            parts = [part["choices"][0]["delta"] for part in events(http_.post(CHAT, json={**body, "stream": True}))]
            assert "".join(part.get("content", "") for part in parts) == found


def test_a_model_without_a_template(folder, tmp_path):
    bare = write_chat_model(tmp_path, "qwen2", template="")
    with client({Named.of(["chat=a"])[0]: OnnxTransformer(bare / "onnx", threads=1)}) as (http_, _):
        answer = http_.post(CHAT, json=GREEDY)
        assert answer.status_code == 400
        assert "chat has no chat_template.jinja; send a prompt to /v1/completions" in answer.json()["error"]["message"]
    with pytest.raises(UserError, match="'today' is no date"):
        ServeSettings(date="today")
