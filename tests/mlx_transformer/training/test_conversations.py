"""A decoder with a chat template learns from conversations: which ids are learned, and a run with an adapter."""

import json

import pytest
from chat_templates import TEMPLATES, TOKENS
from makers_tokenizers import SPECIAL, makers_json
from small_models import DECODER, SIZES, random_weights

from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import ARRAYS
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.data.documents import Documents
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.chat import ChatOptions, ChatTemplates, prompt, render
from mlx_transformer.text.tokenizer import Tokenizer
from mlx_transformer.training.objectives import OBJECTIVES, Reading
from mlx_transformer.training.options import DataOptions
from mlx_transformer.training.recipe import Recipe
from mlx_transformer.training.trainer import Trainer

pytest.importorskip("jinja2")
DATE = "2026-01-31"
TOKENIZER = Tokenizer(makers_json("llama3"))
CHAT = ChatTemplates({"default": TEMPLATES["llama3"]}, TOKENS["llama3"])
TURNS = [{"role": "user", "content": "2 +"}, {"role": "assistant", "content": "the cat"}]
BOS, EOS, _, PAD, _ = (TOKENIZER.encode_control(token)[0] for token in SPECIAL["llama3"])
WIDE = dict(vocab_size=TOKENIZER.vocab_size, max_positions=128, d_model=64, d_ff=64)
CONFIG = TransformerConfig(**{**SIZES, **DECODER, **WIDE}, pad_id=PAD, bos_id=BOS, eos_id=EOS)
TOKENIZER.check_fits(CONFIG, "here")


def read(
    text: Documents, chat: ChatTemplates | None = CHAT, **options: str
) -> tuple[list[list[int]], list[list[bool]]]:
    options = {"chat_date": DATE, **options}
    return OBJECTIVES["language-model"].encoded(text, Reading(TOKENIZER, DataOptions(**options), CONFIG, chat=chat))


def test_prompts_and_completions_are_two_messages_where_there_is_a_template():
    pair, chat = Documents(["the cat"], ["2 +"]), Documents(["{}"], [""], [{"messages": TURNS}])
    [ids], [learned] = read(pair)
    assert ([ids], [learned]) == read(chat)
    begun = prompt(CHAT, TOKENIZER, TURNS[:1], ChatOptions(date=DATE))
    assert (ids[: len(begun)], learned.index(True)) == (begun, len(begun))
    assert ids == TOKENIZER.encode_control(render(CHAT, TURNS, ChatOptions(date=DATE), begin_answer=False))
    assert read(chat, learned="all") == ([ids], [[True] * len(ids)])
    assert read(chat, chat_date="2025-01-31") != read(chat)
    [plain], [own] = read(pair, chat=None)
    assert plain == TOKENIZER.prompts(["2 +"])[0] + TOKENIZER.documents(["the cat"])[0]
    assert sum(own) == len(TOKENIZER.documents(["the cat"])[0])
    with pytest.raises(UserError, match="messages are written by a chat template: start from a checkpoint that has"):
        read(chat, chat=None)


@pytest.mark.parametrize(("kind", "start"), [("llama3", [BOS]), ("smollm2", [])])
def test_a_text_begins_as_its_makers_do(kind, start):
    """With a start token only where their tokenizer writes one, so that a run learns what `evaluate` scores."""
    tokenizer = Tokenizer(makers_json(kind))
    text, how = Documents(["the cat"], [""]), Reading(tokenizer, DataOptions(), CONFIG)
    [ids], [own] = OBJECTIVES["language-model"].encoded(text, how)
    assert ids == [*start, *tokenizer.documents(["the cat"])[0]]
    assert ids[:-1] == tokenizer.prompts(["the cat"])[0]
    assert own == [False] * len(start) + [True] * (len(ids) - len(start))


@pytest.mark.usefixtures("on_cpu")
def test_an_adapter_of_integers_learns_conversations_and_resumes(tmp_path):
    files = {"chat_template.jinja": CHAT.templates["default"]}
    files["generation.json"] = json.dumps({"special_tokens": dict(CHAT.tokens)})
    base = save_checkpoint(tmp_path / "base", CONFIG, random_weights(CONFIG), TOKENIZER.own_json(), texts=files)
    quantize_checkpoint(base, tmp_path / "q4", Scheme(32, 4))
    lines = [
        json.dumps({"messages": TURNS}),
        json.dumps({"prompt": "x", "completion": "hat"}),
        '{"text": "on the mat"}',
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines * 3))

    def train(name, steps, resume=False):
        training = dict(objective="language-model", steps=steps, start_from=str(tmp_path / "q4"), adapter="lora")
        training |= dict(gradient_checkpointing=True, learning_rate=0.05, warmup_steps=1, cooldown=0.0)
        path = str(tmp_path / "chats.jsonl")
        data = dict(text=path, valid_text=path, max_length=64, batch_tokens=128)
        return Trainer(Recipe.from_dict({"data": data, "training": training}), tmp_path / name, resume).run()

    train("run", 2)
    resumed, _ = train("run", 4, resume=True), train("whole", 4)
    one, other = (tmp_path / name / "adapter" / ARRAYS for name in ("run", "whole"))
    assert one.read_bytes() == other.read_bytes()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["data"]["chat_date"]
    assert (resumed.model / "chat_template.jinja").read_text() == files["chat_template.jinja"]
