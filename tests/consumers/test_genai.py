"""onnxruntime-genai loads exported decoders unchanged and gives MLX's greedy tokens, one by one and in a batch.

It pads a batch on the right, so that new tokens of its shorter rows stand behind padding: in target portable, whose
windows count padding, prompts of models with windows go one by one. Its tokenizer can't read ours (a regular
expression with counted repetition), so it is given ids; those of published decoders it reads, but puts no start before
a text, knows no NFC and ends at a NUL.
"""

from pathlib import Path

import mlx.core as mx
import pytest
from cases import CHATS, MAKERS_TEXTS, PUBLISHED, RANDOM, RANDOM_NEW_TOKENS, RandomModel, published_model, run

from export import OnnxTransformer
from export.package import export_onnx

pytestmark = pytest.mark.consumers
WINDOWS = ("mistral-window", "gemma2-wide", "gemma3-sixth", "gemma3-linear", "smollm3-window")
MODELS = [
    (target, name, together)
    for target in ("portable", "cpu")
    for name in (*RANDOM, *PUBLISHED)
    for together in (False, True)
    if not (target == "portable" and together and name in WINDOWS)
]
INTEGERS = [
    (precision, name) for precision in ("int8", "int4") for name in ("llama-wide", "qwen3-yarn", "gemma3-sixth")
]


PENALTIES = {"llama-wide": {"repetition_penalty": 1.3}, "qwen3": {"no_repeat_ngram_size": 2}}


@pytest.fixture(scope="module")
def penalised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RandomModel]:
    return {n: published_model(n, tmp_path_factory.mktemp("penalised"), **more) for n, more in PENALTIES.items()}


@pytest.fixture(scope="module")
def in_cpu(randoms, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """{(precision, model's name): a folder of target cpu}"""
    folder = tmp_path_factory.mktemp("cpu")
    return {
        (precision, name): export_onnx(
            randoms["decoder", name].folder.parent / "model",
            folder / f"{name} {precision}",
            target="cpu",
            precision=precision,
            accept_loss=True,
        )
        for precision, name in (*(("float32", name) for name in (*RANDOM, *PUBLISHED)), *INTEGERS)
    }


@pytest.fixture(scope="module")
def answers(randoms, in_cpu, penalised, chats, tmp_path_factory: pytest.TempPathFactory):
    """{task's name: its answer}; of greedy tokens the model's name, and whether all prompts are one batch."""
    tasks = []
    of_cpu = [(f"{precision} {name}", in_cpu[precision, name], name, False) for precision, name in INTEGERS]
    folders = {("cpu", name): folder for (precision, name), folder in in_cpu.items() if precision == "float32"}
    each = [(f"{t} {n} {g}", folders.get((t, n), randoms["decoder", n].folder), n, g) for t, n, g in MODELS]
    for task, folder, name, together in (*each, *of_cpu):
        random = randoms["decoder", name]
        common = dict(folder=str(folder), rows=random.rows, pad_id=random.config.pad_id)
        more = dict(name=task, kind="generate", max_new_tokens=RANDOM_NEW_TOKENS, together=together)
        tasks.append({**common, **more})
    for name, model in penalised.items():
        common = dict(folder=str(model.folder), rows=model.rows, pad_id=model.config.pad_id, together=False)
        tasks.append(dict(name=f"penalised {name}", kind="generate", max_new_tokens=RANDOM_NEW_TOKENS, **common))
    for kind, chat in chats.items():
        tasks.append(dict(name=f"chat {kind}", kind="chat", folder=str(chat.folder), messages=chat.messages))
        tasks.append(dict(name=f"texts {kind}", kind="tokenize", folder=str(chat.folder), texts=MAKERS_TEXTS))
    try:
        found = run("genai", tasks, tmp_path_factory.mktemp("genai"))
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)

    def answer(*name):
        one = found[" ".join(map(str, name))]
        assert "error" not in one, one["error"]
        return one["value"]

    return answer


def unrestricted(random: RandomModel) -> list[list[int]]:
    """Greedy tokens with nothing banned: genai has no list of tokens that may not be chosen."""
    rows = []
    for prompt in random.rows:
        new: list[int] = []
        while len(new) < RANDOM_NEW_TOKENS:
            id = int(random.model(mx.array([[*prompt, *new]]))[0, -1].argmax())
            if id in random.ends:
                break
            new.append(id)
        rows.append(new)
    return rows


def until_end(row: list[int], ends: set[int]) -> list[int]:
    return row[: next((i for i, id in enumerate(row) if id in ends), len(row))]


@pytest.mark.parametrize(("target", "name", "together"), MODELS)
def test_greedy_tokens(target, name, together, randoms, answers):
    random = randoms["decoder", name]
    expected = unrestricted(random)
    found = [until_end(row, random.ends) for row in answers(target, name, together)]
    assert found == expected
    assert len({id for row in expected for id in row}) > (1 if random.ends > {random.config.eos_id} else 3)


@pytest.mark.parametrize(("precision", "name"), INTEGERS)
def test_greedy_tokens_of_integers(precision, name, randoms, in_cpu, answers):
    """As our runtime's of the same graph; its own prompts in int4 are read by another."""
    random, graphs = randoms["decoder", name], OnnxTransformer(in_cpu[precision, name], threads=1).graphs
    for prompt, row in zip(random.rows, answers(precision, name), strict=True):
        text = graphs.texts()
        text.add()
        new = [int(text.logits(prompt)[-1].argmax())]
        while len(new) < RANDOM_NEW_TOKENS:
            new.append(int(text.step(new[-1:])[0].argmax()))
        assert until_end(row, random.ends) == until_end(new, random.ends)


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties(name, penalised, answers):
    """Of models whose greedy tokens are none that only genai may choose, the start and padding."""
    model = penalised[name]
    expected = model.model.generate(model.rows, max_new_tokens=RANDOM_NEW_TOKENS)
    assert [until_end(row, model.ends) for row in answers("penalised", name)] == expected
    without = dict(repetition_penalty=1.0, no_repeat_ngram=0)
    assert model.model.generate(model.rows, max_new_tokens=RANDOM_NEW_TOKENS, **without) != expected


@pytest.mark.parametrize("kind", CHATS)
def test_published_tokenizers_and_templates(kind, chats, answers):
    chat = chats[kind]
    assert answers("chat", kind) == chat.ids
    start = chat.tokenizer.encode("")
    for text, found in zip(MAKERS_TEXTS, answers("texts", kind), strict=True):
        if "\0" not in text and not (kind == "qwen2" and "e\u0301" in text):
            assert start + found == chat.tokenizer.encode(text)
