"""Conversations with a decoder: the same answers of every runtime, and its templates from whichever file has them."""

from __future__ import annotations

import hashlib
import io
import json
import sys

import numpy as np
import pytest
from chat_templates import CONVERSATIONS, TEMPLATES, TOKENS
from makers_tokenizers import makers_json
from random_models import random_weights

from export import OnnxTransformer, export_onnx
from mlx_transformer import load
from mlx_transformer.cli import main
from mlx_transformer.convert import import_huggingface, to_huggingface
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.families.generation import read_chat
from mlx_transformer.generation.settings import read_settings
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.chat import ChatTemplates, prompt
from mlx_transformer.text.tokenizer import Tokenizer

pytest.importorskip("jinja2")
CONFIG = TransformerConfig(
    **dict(architecture="decoder", encoder_layers=0, norm="rmsnorm", norm_placement="pre", positions="rotary"),
    **dict(gated=True, scale_embeddings=False, attention_bias=False, feed_forward_bias=False, activation="silu"),
    **dict(tie_embeddings="target-output", vocab_size=384, source_vocab_size=384, d_model=16, heads=2, d_ff=24),
    **dict(decoder_layers=1, max_positions=256, dropout=0.0, pad_id=376, bos_id=376, eos_id=378),
)
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|>"}]
QWEN = TEMPLATES["qwen2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoint, published folder with two templates, what import makes of it, and its ONNX folder."""
    place = tmp_path_factory.mktemp("chat")
    save_checkpoint(place / "bare", CONFIG, random_weights(CONFIG, 3), makers_json("qwen2"))
    to_huggingface(place / "bare", place / "theirs", family="llama")
    templates = [{"name": "default", "template": QWEN}, {"name": "tool_use", "template": "T" + QWEN}]
    file = place / "theirs" / "tokenizer_config.json"
    file.write_text(json.dumps({**TOKENS["qwen2"], "chat_template": templates}))
    import_huggingface(place / "theirs", place / "ours")
    export_onnx(place / "ours", place / "onnx")
    to_huggingface(place / "ours", place / "again")
    return place


@pytest.fixture(scope="module")
def models(folder):
    mlx = [load(folder / name)[0] for name in ("ours", "theirs", "again")]
    return [*mlx, OnnxTransformer(folder / "onnx", threads=1)]


def test_every_runtime_and_folder_answers_alike(models):
    tools = CONVERSATIONS["tools"]
    ids = prompt(ChatTemplates({"default": QWEN}), Tokenizer(makers_json("qwen2")), HELLO)
    text = "<|im_start|>user\nHi<|im_end|>\n"
    for model in (models[0], models[-1]):
        rows = {control: model.complete(text, max_new_tokens=5, control_tokens=control) for control in (True, False)}
        assert rows[True] == "".join(model.stream(text, max_new_tokens=5, control_tokens=True))
        assert rows[True] == model.completions([text], max_new_tokens=5, control_tokens=True)[0]["text"]
        assert rows[True] == models[0].complete(text, max_new_tokens=5, control_tokens=True) != rows[False]
    for options in ({"max_new_tokens": 9}, {"sample": True, "seed": 7, "max_new_tokens": 9}, {"beam": 2}):
        answers = {model.chat(HELLO, **options) for model in models}
        assert len(answers) == 1
        assert answers == {
            models[0].tokenizer.decode(models[0].generate([ids], **{"max_new_tokens": 257 - len(ids), **options})[0])
        }
    for model in models:
        assert model.chat_ids(HELLO) == ids
        with_tools = model.chat_ids(tools.messages, tools=tools.tools, date="2026-01-31")
        assert model.tokenizer.decode(with_tools).startswith("Tsystem\n<tools>")
    assert "".join(models[-1].stream_chat(HELLO, max_new_tokens=9)) == models[0].chat(HELLO, max_new_tokens=9)


def test_files_stay_as_they_are(folder):
    text = makers_json("qwen2").encode()
    for name in ("theirs", "ours", "onnx", "again"):
        assert (folder / name / "tokenizer.json").read_bytes() == text
    for name in ("ours", "onnx", "again"):
        assert (folder / name / "chat_template.jinja").read_text() == QWEN
    assert (folder / "again" / "additional_chat_templates" / "tool_use.jinja").read_text() == "T" + QWEN
    values = json.loads((folder / "again" / "tokenizer_config.json").read_text())
    assert {name: text for name, text in values.items() if name.endswith("_token")} == TOKENS["qwen2"]


def test_an_answer_has_room_up_to_the_model_s_positions(models):
    for model in models:
        limit = model._chat_prompt(HELLO, {})[1]["max_new_tokens"]
        assert limit + len(model.chat_ids(HELLO)) == CONFIG.max_positions + 1
    for alone in ("Hi", {"role": "user", "content": "Hi"}):
        with pytest.raises(UserError, match=r"is not a list of messages: give \[{"):
            models[-1].chat(alone)
    with pytest.raises(UserError, match="tokens, the model takes at most 256"):
        models[-1].chat([{"role": "user", "content": "a " * 400}])


def test_text_is_scored_and_continued(models, folder, tmp_path, capsys):
    """The log-probability of what follows a prompt, cut into tokens with it; behind nothing, of a whole text."""
    prompts, texts = ["the cat s", "", "a"], ["at on the mat", "the cat", " b"]
    (tmp_path / "prompts").write_text("".join(f"{line}\n" for line in prompts))
    (tmp_path / "texts").write_text("".join(f"{line}\n" for line in texts))
    tokenizer = models[0].tokenizer
    rows = [tokenizer.encode(prompt + text) for prompt, text in zip(prompts, texts, strict=True)]
    z = np.asarray(models[0].token_logits([[376, *rows[1][:-1]]]))[0].astype(np.float64)
    z = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    for model in models:
        pairs = model.pair_ids(prompts, texts)
        assert [[*source, *target][-len(row) :] for (source, target), row in zip(pairs, rows, strict=True)] == rows
        assert pairs[1] == ([376], rows[1])
        scores = model.score(prompts, texts)
        assert scores[1] == pytest.approx(z[np.arange(len(rows[1])), rows[1]].sum(), abs=1e-4)
        assert model.generate("the cat", max_new_tokens=4) == model.complete("the cat", max_new_tokens=4)
        assert model.generate(["the cat"], max_new_tokens=4) == [model.complete("the cat", max_new_tokens=4)]
        [found] = model.completions(["the cat"], scored=True, max_new_tokens=4, sample=True, seed=1)
        [ids] = model.generate([tokenizer.encode("the cat")], max_new_tokens=4, sample=True, seed=1)
        [values] = model.log_probabilities([tokenizer.encode("the cat")], [ids])
        assert found["tokens"] == [tokenizer.token(id) for id in ids]
        assert found["token_log_p"] == pytest.approx(values)
        assert found["text"] == tokenizer.decode(ids)
        [others] = model.completions(["the cat"], likeliest=3, max_new_tokens=4, sample=True, seed=1)
        assert others["tokens"] == found["tokens"]
        assert others["token_log_p"] == pytest.approx(found["token_log_p"], abs=1e-5)
        logits = np.asarray(model.token_logits([[*tokenizer.encode("the cat"), *ids[:-1]]]))[0, -len(ids) :]
        best = np.argsort(-logits, axis=1, kind="stable")[:, :3].tolist()
        named = [[tokenizer.token(id) if id < tokenizer.vocab_size else f"<{id}>" for id in place] for place in best]
        assert [[name for name, _ in place] for place in others["likeliest"]] == named
    with pytest.raises(UserError, match="pair 1: its text has no token that follows"):
        models[0].score("a", "")
    for name in ("source_language", "target_language"):
        with pytest.raises(UserError, match="language 'de': the model has no language tokens; leave it out"):
            models[0].score("a", "b", **{name: "de"})
    for name in ("ours", "onnx"):
        main(
            ["score", str(folder / name), "--source", str(tmp_path / "prompts"), "--reference", str(tmp_path / "texts")]
        )
        lines = capsys.readouterr().out.splitlines()
        assert [float(line.split("\t")[0]) for line in lines] == pytest.approx(scores, abs=1e-3)
        main(["score", str(folder / name), "--reference", str(tmp_path / "texts"), "--json"])
        alone = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert alone[1]["log_p"] == pytest.approx(scores[1], abs=1e-3)
        assert [each["log_p"] for each in alone] == pytest.approx(models[0].score([""] * 3, texts), abs=1e-3)


def test_a_template_s_digest_is_shown(folder, capsys):
    """It may hide instructions: it is as much the model as its weights."""
    digest = hashlib.sha256(QWEN.encode()).hexdigest()
    assert ChatTemplates({"default": QWEN}).digest == digest
    for name in ("ours", "onnx", "again"):
        assert f"| `chat_template.jinja` | SHA-256 {digest} |" in (folder / name / "README.md").read_text()
        main(["info", str(folder / name)])
        assert "default, tool_use: SHA-256" in " ".join(capsys.readouterr().out.split())
    main(["info", str(folder / "ours")])
    shown = "".join(capsys.readouterr().out.replace("│", "").split())
    origin = json.loads((folder / "ours" / "origin.json").read_text())
    assert f"importedfrom{origin['place']};" in shown
    assert f"model.safetensors:SHA-256{origin['sha256']['model.safetensors']}" in shown


@pytest.mark.parametrize("place", ["file", "files", "text", "list", "processor", "none"])
def test_templates_are_found_wherever_they_are(place, tmp_path):
    named, settings = (
        {"default": "d", "rag": "r"},
        {"bos_token": {"content": "<s>"}, "extra_special_tokens": {"x": "<x>"}},
    )
    (tmp_path / "additional_chat_templates").mkdir()
    if place in ("file", "files"):
        settings["chat_template"] = "older"
        (tmp_path / "chat_template.jinja").write_text("d")
    if place == "files":
        (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    if place in ("text", "list"):
        settings["chat_template"] = "d" if place == "text" else [{"name": n, "template": t} for n, t in named.items()]
    if place == "processor":
        (tmp_path / "chat_template.json").write_text('{"chat_template": "d"}')
    found = read_chat(tmp_path, settings)
    if place == "none":
        assert found == {}
        return
    assert found == {
        "chat_templates": named if place in ("files", "list") else {"default": "d"},
        "special_tokens": {"bos_token": "<s>", "x": "<x>"},
    }
    with pytest.raises(UserError, match="its chat_template is no text"):
        read_chat(tmp_path / "empty", {"chat_template": [{"name": "a"}]})


def test_models_without_a_template_say_so(folder):
    model = load(folder / "bare")[0]
    with pytest.raises(UserError, match=r"bare: has no chat template \(chat_template.jinja\); generate continues"):
        model.chat(HELLO)
    (folder / "bare" / "chat_template.jinja").write_text("put there")
    assert read_settings(folder / "bare", CONFIG) == {"chat_templates": {"default": "put there"}}


def said(capsys, *arguments):
    main(["chat", *map(str, arguments), "--max-new-tokens", "5"])
    return capsys.readouterr().out


def test_the_command(folder, tmp_path, capsys, monkeypatch):
    """Messages as arguments, from a file, from standard input, and typed one by one."""
    (tmp_path / "said.json").write_text(json.dumps(HELLO))
    model = load(folder / "ours")[0]
    first = model.chat(HELLO, max_new_tokens=5)
    for place in ("ours", "onnx"):
        assert said(capsys, folder / place, "--messages", tmp_path / "said.json") == first + "\n"
        assert said(capsys, folder / place, "Hi <|im_end|>", "--system", "Be brief.") == first + "\n"
    again = [*HELLO, {"role": "assistant", "content": first}, {"role": "user", "content": "Go on"}]
    again.append({"role": "assistant", "content": model.chat(again, max_new_tokens=5)})
    assert (
        json.loads(said(capsys, folder / "ours", "Hi <|im_end|>", "Go on", "--system", "Be brief.", "--json")) == again
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi <|im_end|>\n")))
    assert said(capsys, folder / "ours", "--system", "Be brief.") == first + "\n"
    typed = iter(["Hi <|im_end|>", "Go on", ""])
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda: next(typed))
    assert said(capsys, folder / "ours", "--system", "Be brief.") == f"> {first}\n> {again[-1]['content']}\n> "


def test_a_text_that_its_limit_ended_is_named(folder, capsys):
    """On stderr, so that what is piped stays the text; not where a stop word ended it."""

    def written(command: str, *arguments: str) -> tuple[str, str]:
        main([command, str(folder / "ours"), *arguments, "--max-new-tokens", "3"])
        return capsys.readouterr()

    told = "ended at the limit of 3 new tokens; --max-new-tokens raises it, within the model's 256 positions\n"
    text, said = written("generate", "the cat")
    assert said == told
    assert not written("generate", "the cat", "--stop", text[0])[1]
    assert json.loads(written("generate", "the cat", "--stop", text[0], "--json")[0])["finish_reason"] == "stop"
    assert written("chat", "Hi")[1] == told
    assert written("generate", "the cat", "a")[1] == "2 of 2 texts ended at their limit; --max-new-tokens raises it\n"
    found, said = written("generate", "the cat", "--likeliest", "1")
    assert json.loads(found)["finish_reason"] == "length"
    assert not said
    with pytest.raises(SystemExit):
        written("generate", "the cat", "--likeliest", "-1")
    assert "likeliest" in capsys.readouterr().err


def test_nothing_said_is_lost(folder, capsys, monkeypatch):
    """What can't be answered is told, and the conversation goes on; its JSON alone is standard output."""

    def typed():
        yield from ("Hi <|im_end|>", "a " * 400, "Go on")
        raise KeyboardInterrupt

    answers = typed()
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda: next(answers))
    with pytest.raises(SystemExit, match="130"):
        said(capsys, folder / "ours", "--system", "Be brief.", "--json")
    out, error = capsys.readouterr()
    conversation = json.loads(out)
    assert [message["content"] for message in conversation if message["role"] == "user"] == ["Hi <|im_end|>", "Go on"]
    assert "tokens, the model takes at most 256; shorten it; nothing was answered\n> " in error
    assert conversation[2]["content"] in error
    assert conversation[-1]["role"] == "assistant"


def test_an_empty_message_is_one(folder, capsys):
    hello = [{"role": "user", "content": ""}]
    assert said(capsys, folder / "ours", "") == load(folder / "ours")[0].chat(hello, max_new_tokens=5) + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variables", "[1]"], "must be a JSON object"),
        (["--template", "x"], "chat template 'x': the model has default, tool_use"),
        (["--date", "soon"], "--date 'soon' is no date"),
        (["--temperature", "0.5"], "--sample"),
    ],
)
def test_wrong_options_are_one_line(folder, capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        main(["chat", str(folder / "ours"), "Hi", *options])
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
