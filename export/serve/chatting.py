"""Decoder-only models behind OpenAI's /v1/chat/completions: the form, conversations by a template, the answers.

    body -> messages as templates read them -> template -> ids -> as in completing.py

Control tokens in a message, e.g. <|im_end|>, are text. An answer is text, too, with any tool calls as the model writes
them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_transformer.core.tokenizer_files import CHAT_TEMPLATE
from mlx_transformer.generation.settings import CHAT_TEMPLATES, SPECIAL_TOKENS
from mlx_transformer.generation.stream import NewToken
from mlx_transformer.generation.verbs import ANSWER_TOKENS
from mlx_transformer.text.chat import ChatOptions, ChatTemplates, prompt

from .calls import Call
from .completing import MOST_LIKELIEST, NEUTRAL, Asked, Completion, Written, answered, asked_fields, refuse_others
from .requests import FLAG, TEXT, Form, RequestError, flag, number, whole

EXAMPLE = '{"model": "chat", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}'
OBJECT = {"type": "object"}
OBJECTS = {"type": "array", "items": OBJECT}
OTHERS: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}
"""{OpenAI's field without an effect here: values that are accepted}"""
CHAT = Form(
    {
        "model": TEXT,
        "messages": OBJECTS,
        **asked_fields(None),
        "max_completion_tokens": {"type": "integer", "minimum": 1, "description": "The same as max_tokens."},
        "logprobs": {**FLAG, "default": False, "description": "Give the tokens' log-probabilities."},
        "top_logprobs": number(0, "And those of so many of the likeliest.", least=0, most=MOST_LIKELIEST),
        "tools": {**OBJECTS, "description": "Functions that the template tells the model of."},
        "tool_choice": {"enum": ["auto", "none"], "type": "string", "description": "none: tell it of none."},
        "chat_template_kwargs": {**OBJECT, "description": "Other variables of the template."},
        "response_format": OBJECT,
    },
    ["model", "messages"],
    EXAMPLE,
)


class ChatCompletion(Completion):
    """Shared by all parts of an answer in a chat."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    begins = True

    def choice(self, index: int, output: Written) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        scored, reason = self.log_probabilities(output.scored, 0), output.finish_reason
        return {"index": index, "message": message, "logprobs": scored, "finish_reason": reason}

    def piece(self, index: int, text: str, log_probabilities: Any, reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {} if reason else {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": log_probabilities, "finish_reason": reason}

    def log_probabilities(self, tokens: Sequence[NewToken], place: int) -> Any:
        if self.asked.likeliest is None:
            return None

        def named(id: int, log_p: float) -> dict[str, Any]:
            spelled = self.spelling(id)
            return {"token": spelled, "logprob": log_p, "bytes": None if "\ufffd" in spelled else [*spelled.encode()]}

        content = [{**named(t.id, t.log_p), "top_logprobs": [named(*other) for other in t.likeliest]} for t in tokens]
        return {"content": content, "refusal": None}


async def chat(call: Call) -> Any:
    """Answer a conversation, by a decoder-only model with a chat template."""
    values = {name: value for name, value in (await call.values()).items() if value is not None}
    if not isinstance(values.get("model"), str) or "messages" not in values:
        raise RequestError(400, f'body: "model" and "messages" are needed; send {EXAMPLE}')
    messages, options = _messages(values.pop("messages")), _options(values, call.shared.settings.date)
    top = whole("top_logprobs", values.pop("top_logprobs", 0), 0, MOST_LIKELIEST)
    scored = flag("logprobs", values.pop("logprobs", False))
    if top and not scored:
        raise RequestError(400, "top_logprobs: is for logprobs, which is not asked for")
    asked = Asked.taken(values, top if scored else None)
    refuse_others(values, CHAT, NEUTRAL | OTHERS)
    model = call.model(asked.model)
    model.check(asked, 1)
    templates = model.model.generation.get(CHAT_TEMPLATES)
    if not templates:
        raise RequestError(400, f"model: {asked.model} has no {CHAT_TEMPLATE}; send a prompt to /v1/completions")
    known = ChatTemplates(templates, model.model.generation.get(SPECIAL_TOKENS, {}))
    ids = await asyncio.to_thread(prompt, known, model.tokenizer, messages, options)
    if "max_new_tokens" not in asked.options:
        most = model.model.generation.get("max_new_tokens") or ANSWER_TOKENS
        room = max(1, min(most, model.model.config.max_positions + 1 - len(ids)))
        asked = replace(asked, options={**asked.options, "max_new_tokens": room})
    return await answered(call, model, [ids], ChatCompletion(asked, len(ids), model.tokenizer))


def _messages(value: Any) -> list[dict[str, Any]]:
    """Check the messages, and write them as templates read them: text as a string, arguments of calls as objects."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise RequestError(400, "messages: must be a list of at least one object")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(name: str, message: dict[str, Any]) -> dict[str, Any]:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str):
        raise RequestError(400, f"{name}.role: must be a string, e.g. user")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise RequestError(400, f"{name}.content: a part of type {kind!r:.40}: the model reads text alone")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise RequestError(400, f"{name}.content: must be a string or a list of texts")
    if not isinstance(calls, list | None) or not all(isinstance(call, dict) for call in calls or ()):
        raise RequestError(400, f"{name}.tool_calls: must be a list of objects")
    more = {} if calls is None else {"tool_calls": [_call(call) for call in calls]}
    return {**message, "role": "system" if role == "developer" else role, "content": content, **more}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Parse a tool call's arguments: OpenAI's clients send them as JSON text, and templates want an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _options(values: dict[str, Any], date: str | None) -> ChatOptions:
    """Take the template's settings out of the values."""
    tools, choice = values.pop("tools", None), values.pop("tool_choice", "auto")
    variables = values.pop("chat_template_kwargs", {})
    if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
        raise RequestError(400, "tools: must be a list of objects")
    if choice not in ("auto", "none"):
        raise RequestError(400, "tool_choice: this server has auto and none; the model chooses")
    if not isinstance(variables, dict):
        raise RequestError(400, "chat_template_kwargs: must be an object")
    return ChatOptions(tools=(tools or None) if choice == "auto" else None, date=date, variables=variables)
