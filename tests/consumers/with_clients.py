"""What `openai`, `llm`, LangChain's client and `libretranslatepy` make of our server: runs where no package of ours is.

    python with_clients.py PORT KEY IDS

The result is one line of JSON on standard output.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
from pathlib import Path

import openai
from langchain_openai import ChatOpenAI
from libretranslatepy import LibreTranslateAPI

PORT, KEY, *GIVEN = sys.argv[1:]
IDS = [int(id) for id in GIVEN]  # of "one two", as the encoder reads it
ADDRESS = f"http://127.0.0.1:{PORT}"
ASKED = {"model": "stories", "prompt": "one two", "max_tokens": 12, "temperature": 0}
TEXT = "one two\n\ngrößer & 東京"


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"}]
CHAT = {"model": "chat", "messages": MESSAGES, "max_completion_tokens": 9, "temperature": 0}


def with_chat(client):
    whole = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    drawn = client.chat.completions.create(**{**CHAT, "temperature": 1.0}, seed=5, top_p=0.9, n=2, presence_penalty=1)
    extra = client.chat.completions.create(**CHAT, extra_body={"min_p": 0.1, "repetition_penalty": 1.5})
    parts = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    with client.chat.completions.stream(**CHAT) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot
    try:
        client.chat.completions.create(**CHAT, response_format={"type": "json_object"})
    except openai.BadRequestError as error:
        refused = error.body["message"]
    return {
        "text": whole.choices[0].message.content,
        "reason": whole.choices[0].finish_reason,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "logprobs": [each.logprob for each in whole.choices[0].logprobs.content],
        "likeliest": [[top.token for top in each.top_logprobs] for each in whole.choices[0].logprobs.content],
        "drawn": [choice.message.content for choice in drawn.choices],
        "extra": extra.choices[0].message.content,
        "streamed": "".join(choice.delta.content or "" for part in parts for choice in part.choices),
        "stream usage": [parts[-1].usage.prompt_tokens, parts[-1].usage.completion_tokens],
        "final": final.choices[0].message.content,
        "refused": refused,
    }


def with_openai():
    client = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, max_retries=0)
    whole = client.completions.create(**ASKED)
    drawn = client.completions.create(**{**ASKED, "temperature": 1.0, "seed": 5, "top_p": 0.9}, n=2)
    parts = list(client.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    errors = {}
    texts = ["one two", "", "größer & 東京"]
    # Unless told otherwise the client asks for base64, and decodes it.
    vectors = client.embeddings.create(model="mini", input=texts)
    floats = client.embeddings.create(model="mini", input=texts, encoding_format="float", dimensions=5)
    of_ids = client.embeddings.create(model="mini", input=IDS)
    sparse, multi = (
        client.embeddings.create(model="mini", input=texts, extra_body={"kind": kind}) for kind in ("sparse", "multi")
    )
    for name, wrong in (
        ("other model", lambda: client.completions.create(**{**ASKED, "model": "gpt"})),
        ("wrong value", lambda: client.completions.create(**{**ASKED, "top_p": 3})),
        ("not done", lambda: client.completions.create(**ASKED, echo=True)),
        ("key", lambda: openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key="no", max_retries=0).models.list()),
        ("model", lambda: client.models.retrieve("gpt")),
    ):
        try:
            wrong()
        except openai.APIStatusError as error:
            errors[name] = [type(error).__name__, error.status_code, error.code, error.body["message"]]
    return {
        "models": [model.id for model in client.models.list()],
        "model": client.models.retrieve("stories").id,
        "text": whole.choices[0].text,
        "reason": whole.choices[0].finish_reason,
        "usage": whole.usage.total_tokens - whole.usage.prompt_tokens,
        "drawn": [choice.text for choice in drawn.choices],
        "streamed": "".join(choice.text for part in parts for choice in part.choices),
        "stream usage": parts[-1].usage.completion_tokens,
        "embeddings": {
            "texts": [each.embedding for each in vectors.data],
            "floats": [each.embedding for each in floats.data],
            "ids": [each.embedding for each in of_ids.data],
            "sparse": [each.weights for each in sparse.data],
            "multi": [each.embeddings for each in multi.data],
            "tokens": vectors.usage.total_tokens,
        },
        "errors": errors,
        "chat": with_chat(client),
    }


def with_langchain():
    model = ChatOpenAI(
        model="chat",
        base_url=f"{ADDRESS}/v1",
        api_key=KEY,
        temperature=0,
        max_tokens=9,
        max_retries=0,
        stream_usage=True,
    )
    whole, parts = model.invoke(MESSAGES), list(model.stream(MESSAGES))
    total = parts[0]
    for part in parts[1:]:
        total += part
    return {
        "text": whole.content,
        "reason": whole.response_metadata["finish_reason"],
        "usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
        "streamed": total.content,
        "stream usage": [total.usage_metadata["input_tokens"], total.usage_metadata["output_tokens"]],
        "batch": [each.content for each in model.batch([MESSAGES, MESSAGES[1:]])],
    }


def with_llm():
    """The command `llm`, whose file of models names ours: a prompt, whole and streamed, and the chat's next turn."""
    with tempfile.TemporaryDirectory() as name:
        entry = {"model_id": "ours", "model_name": "chat", "api_base": f"{ADDRESS}/v1", "api_key_name": "ours"}
        (Path(name) / "extra-openai-models.yaml").write_text(json.dumps([entry]))
        (Path(name) / "keys.json").write_text(json.dumps({"ours": KEY}))
        command = [str(Path(sys.executable).parent / "llm"), "prompt", "-m", "ours", "-o", "temperature", "0"]
        command += ["-o", "max_tokens", "9"]

        def said(*arguments):
            kept = {**os.environ, "LLM_USER_PATH": name}
            done = subprocess.run(
                [*command, *arguments], capture_output=True, text=True, env=kept, stdin=subprocess.DEVNULL
            )
            return done.stdout.removesuffix("\n") if done.returncode == 0 else done.stderr

        system, user = (message["content"] for message in MESSAGES)
        whole = said("--no-stream", "-s", system, user)
        return {"text": whole, "streamed": said("-s", system, user), "next": said("-c", "And?")}


def with_libretranslate():
    client = LibreTranslateAPI(ADDRESS, api_key=KEY)
    try:
        LibreTranslateAPI(ADDRESS).translate("one", "en", "de")
    except urllib.error.HTTPError as error:
        refused = [error.code, json.loads(error.read())]
    return {
        "languages": client.languages(),
        "detect": client.detect("one two"),
        "text": client.translate(TEXT, "en", "de"),
        "auto": client.translate("one", "auto", "de"),
        "refused": refused,
    }


said = {"openai": with_openai(), "libretranslate": with_libretranslate()}
print(json.dumps({**said, "langchain": with_langchain(), "llm": with_llm()}))
