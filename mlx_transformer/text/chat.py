"""Chat templates: turn a conversation into the text format that a model was trained on, and into token ids.

A template is a program by the model's publisher. It runs in Jinja2's immutable sandbox, with strings, numbers, lists
and dicts only, and with limits on time and length. Control tokens that the template writes, e.g. <|im_end|>, count as
tokens. Typed in a message they are text, so nobody can end a turn from within it.

    messages -> mark their control tokens -> template -> text -> ids; marked spellings stay text

The text is that of transformers 5 (`apply_chat_template`), except that the date can be fixed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import date as Date  # noqa: N812 - a type
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_transformer.system.errors import UserError, error_line, first_of
from mlx_transformer.system.lazy import needs

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""E.g. [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]."""

DEFAULT, TOOLS = "default", "tool_use"
"""Names of templates. If tools are given, `TOOLS` is used where the model has it."""
SECONDS, STEPS, CHARACTERS = 5.0, 2_000_000, 1 << 24
"""Limits of a rendering: seconds, calls and loop turns together, and the length of any string."""
WIDENING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "batch", "slice", "to_bytes"}
WIDEST = 1000
"""Functions and filters that pad to a width, and the largest width."""
GROWING = {"*", "replace", "join", "indent"}
"""Operations whose result may be as large as the product of two arguments."""
ROLES = ("system", "user", "assistant", "tool", "developer", "model", "function")
"""A role with nearly such a spelling is a mistake; other roles are left to the template."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that programs use for a message's reasoning; each template reads a different name."""


class ChatTemplates(NamedTuple):
    """A model's chat templates."""

    templates: Mapping[str, str]
    """{name: text}; a single template has the name "default"."""
    tokens: Mapping[str, str] = {}
    """{variable in templates: token}, e.g. {"bos_token": "<s>"}."""

    @property
    def digest(self) -> str:
        """SHA-256 of all templates and their names. A template may hide instructions, so it belongs to the model as its
        weights do."""
        texts = [self.templates[DEFAULT]] if [*self.templates] == [DEFAULT] else sorted(self.templates.items())
        return hashlib.sha256((texts[0] if isinstance(texts[0], str) else json.dumps(texts)).encode()).hexdigest()

    def chosen(self, name: str | None, tools: bool) -> str:
        """Return a template's text. Raises `UserError` for an unknown name, or without a default template."""
        found = name or (TOOLS if tools and TOOLS in self.templates else DEFAULT)
        if found not in self.templates:
            raise UserError(
                f"chat template {found!r:.60}: the model has {', '.join(self.templates) or 'none'}; name it"
            )
        return self.templates[found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """A template's further inputs."""

    template: str | None = None
    """Name of the template, if the model has several; unset: "tool_use" with tools, else "default"."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the model may call, as JSON schemas."""
    documents: Sequence[Mapping[str, Any]] | None = None
    """Texts to answer from, as {"title": ..., "text": ...}."""
    date: str | None = None
    """The current date for templates, e.g. 2026-01-31; unset: today, so that prompts change from day to day."""
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Other variables of the template, e.g. {"enable_thinking": False}."""
    continued: bool = False
    """Continue the last message instead of answering it."""


def render(
    chat: ChatTemplates, messages: Messages, options: ChatOptions = ChatOptions(), begin_answer: bool = True
) -> str:
    """Render a conversation. begin_answer: end where the model's answer begins (add_generation_prompt).

    Raises `UserError` for messages that the template refuses, and for a template that fails or exceeds a limit."""
    return _rendered(chat, messages, options, begin_answer, lambda value: value)


def prompt(
    chat: ChatTemplates, tokenizer: Tokenizer, messages: Messages, options: ChatOptions = ChatOptions()
) -> list[int]:
    """Render a conversation to the ids of a prompt, after which the model answers.

    A start token comes only from the template. Raises `UserError` as `render` does, and for an empty prompt.
    """
    mark = _unused(repr([messages, options]))
    protect = _marking(tokenizer.control_tokens, mark)
    text = _rendered(chat, messages, options, not options.continued, protect)
    ids = tokenizer.encode_control(text, mark)
    if not ids:
        raise UserError("the conversation is empty: give a message")
    return ids


def answers(
    chat: ChatTemplates, tokenizer: Tokenizer, messages: Messages, options: ChatOptions = ChatOptions()
) -> tuple[list[int], list[bool]]:
    """Render a whole conversation for training: (ids, for each id whether the assistant wrote it).

    The end of the assistant's turn counts as written. Text that the template changes after later turns doesn't, e.g.
    earlier reasoning, which Qwen3's template drops."""
    mark = _unused(repr([messages, options]))
    protect = _marking(tokenizer.control_tokens, mark)

    def written(count: int, begin_answer: bool) -> tuple[str, list[int]]:
        text = _rendered(chat, messages[:count], options, begin_answer, protect)
        return text, tokenizer.encode_control(text, mark)

    whole, ids = written(len(messages), False)
    by_model = [False] * len(ids)
    for i in (i for i, message in enumerate(messages) if message.get("role") == "assistant"):
        (before, begun), (_, ended) = written(i, True), written(i + 1, False)
        if whole.startswith(before):
            first, last = _common(ids, begun), _common(ids, ended)
            by_model[first:last] = [True] * (last - first)
    return ids, by_model


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))


def _rendered(
    chat: ChatTemplates,
    messages: Messages,
    options: ChatOptions,
    begin_answer: bool,
    protect: Callable[[str], str],
) -> str:
    if isinstance(messages, (str, Mapping)):
        raise UserError(f'{messages!r:.60} is not a list of messages: give [{{"role": "user", "content": "..."}}]')
    plain = [_without_none(message) for message in _plain(list(messages), protect)]
    source = chat.chosen(options.template, bool(options.tools))
    end = ""
    if options.continued:
        plain, end = _open_ended(plain, chat.templates)
    values = {
        **chat.tokens,
        **_plain(dict(options.variables), protect),
        "messages": plain,
        "tools": _plain(options.tools, protect),
        "documents": _plain(options.documents, protect),
        "add_generation_prompt": begin_answer and not options.continued,
    }
    text = _run(source, values, _day(options.date))
    if not options.continued:
        return text
    place = text.rfind(end.strip())
    if place < 0:
        raise UserError("the chat template leaves the last message out, so it can't be continued")
    return text[:place] if text[place : place + len(end)] == end else text[:place].rstrip()


def _open_ended(messages: list[Any], taken: Mapping[str, str]) -> tuple[list[Any], str]:
    """(messages with a mark at the end of the last one's text, the mark)"""
    mark = f"{_unused(repr([messages, taken]))}end "
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        last["content"] = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{mark}"}]
    elif isinstance(content, str):
        last["content"] = content + mark
    else:
        raise UserError("the last message has no text to continue")
    return [*messages[:-1], last], mark


def _day(date: str | None) -> datetime:
    try:
        return datetime.now() if date is None else datetime.fromisoformat(date)
    except (TypeError, ValueError):
        raise UserError("{date!r:.40} is no date: write it as in 2026-01-31", date=date) from None


def _plain(value: Any, protect: Callable[[str], str]) -> Any:
    """Convert a value to JSON's types, with `protect` applied to its strings."""
    if isinstance(value, str):
        return protect(str.__str__(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, protect): _plain(item, protect) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, protect) for item in value]
    if isinstance(value, (Date, datetime)):
        return value.isoformat()
    return f"<{type(value).__name__}>"


def _without_none(message: Any) -> dict[str, Any]:
    """Drop a message's keys with None; store its reasoning under the names that templates read."""
    if not isinstance(message, dict):
        raise UserError(f'{message!r:.60} is not a message: give {{"role": "user", "content": "..."}}')
    known = {key: value for key, value in message.items() if value is not None}
    role = known.get("role")
    if role not in ROLES and isinstance(role, str) and (near := get_close_matches(role, ROLES, 1, 0.75)):
        raise UserError(f"role {role!r:.40}: did you mean {near[0]!r}?")
    reasoning = next((known[name] for name in REASONING if name in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


def _unused(text: str) -> str:
    """A private-use character that neither the text nor its repr contains."""
    return next(c for i in range(0xF0000, 0xFFFFD) if (c := chr(i)) not in text and repr(c)[1:-1] not in text)


def _marking(tokens: Sequence[str], mark: str) -> Callable[[str], str]:
    """Make a function that puts `mark` after the first character of each control token in a text, whatever its case.

    A control token cut off at the end of the text is marked, too, as the next message might complete it.
    """
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)", re.IGNORECASE)
    begun = {token[:n].lower() for token in tokens for n in range(1, len(token))}
    longest = max(map(len, begun), default=0)

    def marked(text: str) -> str:
        text = pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        n = next((n for n in range(min(longest, len(text)), 0, -1) if text[-n:].lower() in begun), 0)
        return text if not n else f"{text[: 1 - n or None]}{mark}{text[len(text) + 1 - n :]}"

    return marked


# The sandbox.
class _Budget:
    """The steps and seconds that a rendering has left."""

    def __init__(self, now: datetime) -> None:
        self.now, self.steps, self.end = now, STEPS, time.monotonic() + SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0 or (self.steps % 256 == 0 and time.monotonic() > self.end):
            raise UserError(f"the chat template takes over {SECONDS:.0f} seconds or {STEPS:,} steps")

    @staticmethod
    def check(size: int) -> None:
        if size > CHARACTERS:
            raise UserError(f"the chat template makes a text of over {CHARACTERS:,} characters")


_budget: ContextVar[_Budget] = ContextVar("budget")


def _run(source: str, values: Mapping[str, Any], now: datetime) -> str:
    jinja2 = _jinja()
    token = _budget.set(_Budget(now))
    try:
        parts, size = [], 0
        for part in _compiled(source).generate(**values):
            size += len(part)
            _Budget.check(size)
            parts.append(part)
        return "".join(parts)
    except UserError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template, line {error.lineno}: {error_line(error)}") from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the chat template refuses the conversation: {error_line(error)}") from None
    except (RecursionError, MemoryError):
        raise UserError("the chat template nests too deeply or needs too much memory") from None
    finally:
        _budget.reset(token)


def _jinja() -> Any:
    """Import Jinja2. Raises `UserError` if it is missing or older than 3.1.6, whose sandbox had known holes."""
    try:
        jinja2: Any = import_module("jinja2")
        for name in ("ext", "sandbox"):
            import_module(f"jinja2.{name}")
    except ImportError:
        raise UserError(f"chat templates need Jinja2: {needs('chat')}") from None
    version = tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3])
    if version < (3, 1, 6):
        raise UserError(f"Jinja2 {jinja2.__version__} has known holes in its sandbox: pip install 'jinja2>=3.1.6'")
    return jinja2


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> Any:
    """Make Jinja2's sandbox with limits: it counts calls, filters, operators and loop turns, and checks the size of
    strings and lists before they are made."""
    jinja2 = _jinja()
    nodes, namespace = jinja2.nodes, jinja2.utils.Namespace

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}, which marks the model's own words for training."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Namespace(namespace):
        """A namespace without names such as __class__."""

        def __init__(*args: Any, **values: Any) -> None:
            Namespace._check(dict(*args[1:], **values))
            namespace.__init__(*args, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace._check({name: value})
            super().__setitem__(name, value)

        @staticmethod
        def _check(names: Mapping[str, Any]) -> None:
            if wrong := [name for name in names if str(name).startswith("_")]:
                raise jinja2.exceptions.SecurityError(f"a namespace has no {first_of(wrong, ', ')}")

    class Limited(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            tree = super()._parse(source, name, filename)
            for node in [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:
                turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None, lineno=node.lineno)
                node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
            _replace_joins(tree, nodes)
            return tree

        def turn(self) -> None:
            _budget.get().step()

        def joined(self, *parts: Any) -> str:
            texts = [str(part) for part in parts]
            _Budget.check(sum(map(len, texts)))
            return "".join(texts)

        def call(self, context: Any, f: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            _budget.get().step()
            method = getattr(f, "__wrapped__", f)  # the sandbox's own str.format
            _check_growth(getattr(method, "__name__", ""), [getattr(method, "__self__", None), *args], kwargs)
            return _sized(super().call(context, f, *args, **kwargs))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _budget.get().step()
            _check_growth(operator, [left, right], {})
            return _sized(super().call_binop(context, operator, left, right))

    environment = Limited(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"], optimized=False
    )
    environment.filters |= {"tojson": _to_json}
    environment.filters = {name: _counted(name, one) for name, one in environment.filters.items()}
    environment.globals = {
        "range": environment.globals["range"],
        "cycler": environment.globals["cycler"],
        "joiner": environment.globals["joiner"],
        "dict": _Dict(),
        "namespace": Namespace,
        "raise_exception": _refuse,
        "strftime_now": lambda form: _budget.get().now.strftime(form),
    }
    return environment


def _replace_joins(node: Any, nodes: Any) -> None:
    """Replace each `a ~ b` by a call that checks the length of the result."""
    for name in node.fields:
        value = getattr(node, name)
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, nodes.Node):
                continue
            _replace_joins(child, nodes)
            if isinstance(child, nodes.Concat):
                call = nodes.Call(
                    nodes.EnvironmentAttribute("joined"), child.nodes, [], None, None, lineno=child.lineno
                )
                if i is None:
                    setattr(node, name, call)
                else:
                    value[i] = call


def _counted(name: str, one: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it counts as a step. `wraps` keeps the attributes by which Jinja2 passes its context."""

    @wraps(one)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        _check_growth(name, args, kwargs)
        return _sized(one(*args, **kwargs))

    return checked


def _sized(made: Any) -> Any:
    _Budget.check(len(made) if isinstance(made, (str, list)) else 0)
    return made


def _check_growth(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `UserError` if a function, filter or operator would make a result that is too large."""
    given = [*args, *kwargs.values()]
    sizes = [len(x) if isinstance(x, (str, list, tuple)) else abs(x) if type(x) is int else 1 for x in given]
    if name == "+":
        _Budget.check(0 if isinstance(given[0], (int, float)) else sum(sizes))
    elif name in ("*", "**") and all(isinstance(x, (int, float)) for x in given):
        bits = [x.bit_length() if isinstance(x, int) else 0 for x in given]
        if sum(bits) > 4096 or (name == "**" and bits[0] * abs(given[1]) > 4096):
            raise UserError("the chat template makes a number of over 4,096 bits")
    elif name in WIDENING and any(type(x) is int and abs(x) > WIDEST for x in given):
        raise UserError(f"the chat template asks for a width of over {WIDEST:,}")
    elif name in ("%", "format", "format_map"):
        form = next((x for x in given if isinstance(x, str)), "")
        if re.search(r"\d{4}|\*", form) or len(form) > 1 << 14:
            raise UserError(f"the chat template formats by {form!r:.40}, whose result may be too wide")
    elif name in GROWING:
        largest = sorted(sizes)[-2:]
        _Budget.check(max(largest) * min(largest) // 4)


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: Any) -> Iterator[Any]:
    raise _jinja().TemplateError(str(message))
