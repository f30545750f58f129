"""Optimum and transformers.js load exported folders unchanged and give MLX's greedy tokens, as ids and as text.

Shapes: B batch, L positions, V vocabulary.
"""

import subprocess
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from cases import (
    ARCHITECTURES,
    BATCH,
    CHATS,
    HERE,
    MAKERS_TEXTS,
    MARKED,
    NEW_TOKENS,
    PUBLISHED,
    RANDOM,
    RANDOM_NEW_TOKENS,
    SECONDS,
    SPECIAL_TEXT,
    TEXTS,
    Trained,
    first_difference,
)
from documents import blocks
from imports import ROOT

pytestmark = pytest.mark.consumers

CONSUMERS = ("optimum", "transformers.js")
LAYOUTS = (("optimum", "merged"), ("optimum", "split"), ("transformers.js", "merged"))


def new_tokens(row: list[int], before: int, ends: set[int], pad: int) -> list[int]:
    """A row of generate's output without the `before` tokens it began with, its end, and the padding behind it."""
    row = row[before:]
    end = next((i for i, id in enumerate(row) if id in ends), len(row))
    assert set(row[end + 1 :]) <= {*ends, pad}, f"tokens after the end of a sentence: {row}"
    return row[:end]


def differing(trained: Trained, found: list[list[int]]) -> list[str]:
    """One line a row that is not MLX's, with the gap between both tokens' logits there: a tiny one is a tie.

    `found`: rows for the first phrases."""
    lines = []
    for i, (ours, theirs) in enumerate(zip(trained.tokens, found, strict=False)):
        if ours != theirs:
            config = trained.model.config
            at, a, b = first_difference(ours, theirs, config.eos_id)
            before = mx.array([[config.bos_id, *ours[:at]]])
            logits = trained.model(mx.array(trained.tokenizer.encode_batch([trained.phrases[i]])), before)[0, -1]
            gap = (logits[a] - logits[b]).item()
            lines.append(f"{trained.phrases[i]!r}, token {at}: MLX {a}, consumer {b}, logits differ by {gap:.1e}")
    return lines


def test_the_comparison_is_of_a_trained_model_on_padded_batches(trained):
    """Else equality would prove little: nearly all sentences differ, most end, a batch has several lengths."""
    assert len(trained.phrases) == 200
    assert len({tuple(tokens) for tokens in trained.tokens}) > 150
    assert sum(len(tokens) < NEW_TOKENS for tokens in trained.tokens) > 180
    lengths = [len(ids) for ids in trained.tokenizer.encode_batch(trained.phrases)]
    assert all(len(set(lengths[i : i + BATCH])) > 1 for i in range(0, len(lengths), BATCH))


@pytest.mark.parametrize(("consumer", "layout"), LAYOUTS)
def test_greedy_tokens_and_text(consumer, layout, trained, ask):
    found = ask(consumer, layout)
    config = trained.model.config
    assert {row[0] for row in found["ids"]} == {config.bos_id}
    tokens = [new_tokens(row, 1, {config.eos_id}, config.pad_id) for row in found["ids"]]
    problems = differing(trained, tokens)
    assert not problems, f"{len(problems)} of {len(tokens)} rows: " + "\n".join(problems[:10])
    assert found["texts"] == trained.tokenizer.decode_batch(trained.tokens)


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_translation_pipeline(consumer, trained, ask):
    assert ask(consumer, "pipeline") == trained.tokenizer.decode_batch([tokens for _, tokens in trained.finished()])


def test_javascript_of_the_targets_page(trained):
    """In Node, so from a folder instead of a server, on the device that is called so there."""
    (code,) = (b.code for b in blocks((ROOT / "export/targets/README.md").read_text("utf-8")) if b.kind == "js")
    expected = trained.tokenizer.decode(trained.model.generate(trained.tokenizer.encode_batch(["May 3, 2024"]))[0])
    for ours, here in {
        "'/models/'": f"'{trained.web.parent}/'",
        "'mine'": f"'{trained.web.name}'",
        "device: 'wasm'": "device: 'cpu'",
    }.items():
        assert code.count(ours) == 1
        code = code.replace(ours, here)
    code += "\nconsole.log(translation_text);"
    command = ["node", "--input-type=module", "-e", code]
    done = subprocess.run(command, cwd=HERE / "node", capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_tokenizer(consumer, trained, ask):
    found = ask(consumer, "tokenize")
    texts = [*TEXTS, *trained.phrases]
    ids = trained.tokenizer.encode_batch(texts)
    wrong = [(t, ours, theirs) for t, ours, theirs in zip(texts, ids, found["ids"], strict=True) if ours != theirs]
    assert not wrong
    assert found["texts"] == [*texts, *trained.tokenizer.decode_batch(trained.tokens)]


def test_special_tokens_written_in_a_text_are_text(trained, ask):
    """transformers.js has no such setting and reads them as tokens: the one known difference."""
    ours = trained.tokenizer.encode(SPECIAL_TEXT)
    assert ask("optimum", "special")["ids"] == [ours]
    assert ask("transformers.js", "special")["ids"] != [ours], "transformers.js has learned it: ask it this as the rest"


@pytest.mark.parametrize(
    ("architecture", "name"), [*product(["encoder-decoder", "decoder"], RANDOM), *product(["decoder"], PUBLISHED)]
)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_greedy_tokens_of_random_models(consumer, architecture, name, randoms, ask):
    random = randoms[architecture, name]
    expected = random.model.generate(random.rows, max_new_tokens=RANDOM_NEW_TOKENS)
    before = 1 if architecture == "encoder-decoder" else max(map(len, random.rows))
    rows = ask(consumer, f"{architecture} {name}")
    assert [new_tokens(row, before, random.ends, random.config.pad_id) for row in rows] == expected
    assert len({token for row in expected for token in row}) > (1 if random.ends > {random.config.eos_id} else 3)


@pytest.mark.parametrize("name", [name for name, ends in PUBLISHED.items() if ends])
def test_other_ends_end_texts(name, randoms):
    """Else readers that don't know them would pass."""
    random = randoms["decoder", name]
    free = random.model.generate(random.rows, max_new_tokens=RANDOM_NEW_TOKENS, end_ids=())
    assert random.model.generate(random.rows, max_new_tokens=RANDOM_NEW_TOKENS) != free


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_published_tokenizers_and_templates(consumer, kind, chats, ask):
    chat = chats[kind]
    assert ask(consumer, f"chat {kind}") == chat.ids
    assert ask(consumer, f"texts {kind}")["ids"] == [chat.tokenizer.encode(text) for text in MAKERS_TEXTS]


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_tokens_that_a_maker_added(consumer, name, marked, ask):
    each = marked[name]
    assert sum(token in line for line in each.texts for token in ("[E1]", "<hole>", "{NAME}")) > 80
    assert ask(consumer, f"marked {name}")["ids"] == each.tokenizer.source.encode_batch(each.texts)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_logits_of_encoders(consumer, name, randoms, ask):
    random = randoms["encoder", name]
    ids, mask = random.padded()
    expected = np.array(random.model(ids, mask.astype(bool)))
    found = np.array(ask(consumer, f"encoder {name}"))
    assert found.shape == expected.shape  # (B, L, V)
    np.testing.assert_allclose(found[mask == 1], expected[mask == 1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["trained", *(f"{a} {n}" for a in ARCHITECTURES for n in RANDOM)])
def test_webassembly_opens_every_graph(name, trained, randoms, ask):
    """And computes the encoder's output, or the logits of the only graph."""
    found = ask("transformers.js", f"wasm {name}")
    if name == "trained":
        model, graphs = trained.model, 2
        ids = np.array(trained.tokenizer.encode_batch(trained.phrases[-1:]))
        mask = np.ones_like(ids)
    else:
        architecture, kind = name.split()
        random = randoms[architecture, kind]
        model, graphs = random.model, 4 if architecture == "encoder-decoder" else 1
        ids, mask = random.padded()
    assert found["opened"] == graphs
    compute = model.encode if model.config.architecture == "encoder-decoder" else model
    expected = np.array(compute(ids, mask.astype(bool)))
    output = np.array(found["output"]).reshape(expected.shape)
    np.testing.assert_allclose(output[mask == 1], expected[mask == 1], atol=2e-5, rtol=1e-5)
