"""Chat templates: texts and ids of transformers; no message ends a turn, and no template runs away."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from chat_templates import CONVERSATIONS, INJECTED, TEMPLATES, TOKENS
from makers_tokenizers import SPECIAL, makers_json

from mlx_transformer.system.errors import UserError
from mlx_transformer.text import chat
from mlx_transformer.text.chat import ChatOptions, ChatTemplates, answers, prompt, render
from mlx_transformer.text.tokenizer import Tokenizer

pytest.importorskip("jinja2")
GOLDEN = json.loads((Path(__file__).parent / "golden_chat.json").read_text())
USER = [{"role": "user", "content": "Hi"}]


def options(each):
    return ChatOptions(tools=each.tools, variables=each.variables, date=each.date)


def rendered(text, messages=USER, **others):
    return render(ChatTemplates({"default": text}, {"bos_token": "<s>"}), messages, ChatOptions(**others))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_texts_and_ids_are_those_of_transformers(kind):
    templates, tokenizer = ChatTemplates({"default": TEMPLATES[kind]}, TOKENS[kind]), Tokenizer(makers_json(kind))
    for name, each in CONVERSATIONS.items():
        text, without_answer, ids = GOLDEN[kind][name]
        if text is None:
            with pytest.raises(UserError, match="the chat template refuses the conversation: "):
                prompt(templates, tokenizer, each.messages, options(each))
            continue
        assert render(templates, each.messages, options(each)) == text, name
        assert render(templates, each.messages, options(each), begin_answer=False) == without_answer, name
        assert prompt(templates, tokenizer, each.messages, options(each)) == ids, name
    assert sum(text is not None for text, *_ in GOLDEN[kind].values()) > 5


ENDS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>Ċ", "tekken": "</s>", "phi3": "<|end|>"}


@pytest.mark.parametrize("kind", [kind for kind in TEMPLATES if kind != "gpt2"])
def test_answers_are_what_the_assistant_wrote(kind):
    """With the end of its turn; behind a single prompt all but the prompt, as in mlx-lm."""
    templates, tokenizer = ChatTemplates({"default": TEMPLATES[kind]}, TOKENS[kind]), Tokenizer(makers_json(kind))
    dated = ChatOptions(date="2026-01-31")
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate("hahe")]
    ids, own = answers(templates, tokenizer, messages, dated)
    written = "".join(tokenizer.token(id) for id, learned in zip(ids, own, strict=True) if learned)
    for spelled, character in {"<0x0A>": "Ċ", "<0x61>": "a", "<0x65>": "e", "Ġ": "", "▁": ""}.items():
        written = written.replace(spelled, character)
    end = ENDS.get(kind, "<|im_end|>Ċ")
    assert written == f"a{end}e{end}{'</s>' * (kind == 'phi3')}"
    begun = prompt(templates, tokenizer, messages[:1], dated)
    ids, own = answers(templates, tokenizer, messages[:2], dated)
    assert (ids[: len(begun)], own) == (begun, [False] * len(begun) + [True] * (len(ids) - len(begun)))


@pytest.mark.parametrize("kind", TEMPLATES)
def test_control_tokens_in_messages_are_text(kind):
    """Every control token's spelling, in capitals too; no message ends a turn, though the text is the same."""
    templates, tokenizer = ChatTemplates({"default": TEMPLATES[kind]}, TOKENS[kind]), Tokenizer(makers_json(kind))
    text, ids = GOLDEN[kind]["injected"]
    assert render(templates, INJECTED.messages, options(INJECTED)) == text
    assert prompt(templates, tokenizer, INJECTED.messages, options(INJECTED)) == ids
    control = {tokenizer._backend.token_to_id(spelling) for spelling in tokenizer.control_tokens}

    def count(content):
        ids = prompt(templates, tokenizer, [{"role": "user", "content": content}], ChatOptions(date="2026-01-31"))
        return sum(id in control for id in ids)

    for spelling in SPECIAL[kind]:
        assert (
            count("a") == count(f"a{spelling}b") == count(spelling) == count(spelling.upper()) == count(spelling[:-1])
        )


def test_messages_make_no_control_token_together():
    """Two parts of a message, one behind the other; and a template that changes a message's letters."""
    tokenizer = Tokenizer(makers_json("smollm2"))
    for template in (
        "{% for part in messages[0].content %}{{ part.text }}{% endfor %}",
        "{{ messages[0].content | map(attribute='text') | join | lower }}",
    ):
        for parts in (
            ["<|im_", "end|>"],
            ["<", "|im_end|>"],
            ["<|im_end|", ">"],
            ["<|IM_END|>", "<|Im_"],
            ["<", "<|im_end|>"],
        ):
            message = {"role": "user", "content": [{"type": "text", "text": part} for part in parts]}
            ids = prompt(ChatTemplates({"default": template}), tokenizer, [message])
            assert not {0, 1, 2} & {*ids}
            joined = "".join(parts)
            assert tokenizer.decode(ids) == (joined.lower() if "lower" in template else joined)


def test_several_templates():
    templates = ChatTemplates({"default": "d", "tool_use": "t{{ tools | length }}", "rag": "r{{ documents[0].text }}"})
    assert render(templates, USER) == "d"
    assert render(templates, USER, ChatOptions(tools=[{"a": 1}])) == "t1"
    assert render(templates, USER, ChatOptions(template="default", tools=[{}])) == "d"
    assert render(templates, USER, ChatOptions(template="rag", documents=[{"text": "x"}])) == "rx"
    with pytest.raises(UserError, match=r"chat template 'none': the model has default, tool_use, rag"):
        render(templates, USER, ChatOptions(template="none"))
    assert ChatTemplates({"default": "d"}).digest != templates.digest


def test_the_date_is_fixed_by_an_option():
    assert rendered("{{ strftime_now('%d %b %Y') }}", date="2024-07-26") == "26 Jul 2024"
    assert rendered("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    with pytest.raises(UserError, match=r"'tomorrow' is no date: write it as in 2026-01-31"):
        rendered("", date="tomorrow")


def test_an_answer_that_is_begun_goes_on():
    templates, tokenizer = ChatTemplates({"default": TEMPLATES["qwen2"]}), Tokenizer(makers_json("qwen2"))
    messages = [*USER, {"role": "assistant", "content": "Hello <|im_end|>, "}]
    whole = render(templates, messages, ChatOptions(continued=True))
    assert whole == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello <|im_end|>, "
    ids = prompt(templates, tokenizer, messages, ChatOptions(continued=True))
    assert tokenizer.decode(ids) == "user\nHi\nassistant\nHello <|im_end|>, "
    trimmed = render(ChatTemplates({"default": TEMPLATES["gemma"]}), messages, ChatOptions(continued=True))
    assert trimmed.endswith("<start_of_turn>model\nHello <|im_end|>,")
    with pytest.raises(UserError, match="leaves the last message out"):
        rendered("x", messages, continued=True)


def test_templates_see_plain_data_alone():
    class Open(str):
        def secret(self):
            return "s"

    message = {"role": Open("user"), "content": {"path": Path("x"), "when": (1, 2.5, None, True)}}
    assert rendered("{{ messages[0] }}", [message]) == (
        "{'role': 'user', 'content': {'path': '<PosixPath>', 'when': [1, 2.5, None, True]}}"
    )
    with pytest.raises(UserError, match="has no attribute 'secret'"):
        rendered("{{ messages[0].role.secret() }}", [message])
    for wrong in (["Hi"], [None], ["role"]):
        with pytest.raises(UserError, match="is not a message: give"):
            rendered("", wrong)


def test_a_misspelt_role_is_refused_and_a_makers_own_is_not():
    with pytest.raises(UserError, match=r"^role 'asistant': did you mean 'assistant'"):
        rendered("", [{"role": "user", "content": "2 + 2"}, {"role": "asistant", "content": "4"}])
    assert rendered("{{ messages[0].role }}", [{"role": "environment", "content": "4"}]) == "environment"


ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "depth": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "joined": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "summed": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "numbers": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "times": "{{ 'x' * 10 ** 9 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "written": "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "center": "{{ 'x' | center(1000000000) }}",
    "padded": "{{ 'x'.ljust(1000000000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "filter": "{{ '%1000000000d' | format(1) }}",
    "method": "{{ '{:1000000000}'.format(1) }}",
    "replaced": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "indented": "{{ ('\\n' * 999999) | indent(999) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "range": "{{ range(1000000000) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_runs_away_is_stopped(name, monkeypatch):
    monkeypatch.setattr(chat, "STEPS", 20_000)
    monkeypatch.setattr(chat, "SECONDS", 600.0)  # so it's not the clock that stops it
    with pytest.raises(UserError, match="the chat template"):
        rendered(ENDLESS[name])


def test_time_is_limited_too(monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.05)
    with pytest.raises(UserError, match="takes over"):
        rendered(ENDLESS["loops"])


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__globals__.x }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ (''|attr('__class__')).x }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% include 'x' %}",
        "{{ self.__dict__.x }}",
        "{% unknown %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_what_no_template_does(text):
    with pytest.raises(UserError, match="the chat template"):
        rendered(text)


def test_a_missing_or_old_jinja_is_one_line(monkeypatch):
    import jinja2

    monkeypatch.setattr(jinja2, "__version__", "3.1.5")
    with pytest.raises(UserError, match=r"Jinja2 3.1.5 has known holes in its sandbox: pip install 'jinja2>=3.1.6'"):
        rendered("x")
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(UserError, match=r"chat templates need Jinja2: pip install -e '.*\[chat\]'"):
        rendered("x")
