"""One ONNX file of a decoder with its search: tokens and scores of MLX's `search`, prompts padded on either side."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chat_models import write_chat_model
from combined import thinned
from command_line import caller, refused
from makers_tokenizers import makers_json
from random_models import random_weights

from export import OnnxTransformer
from export.search import SearchModel, export_search
from export.search.triton import export_triton
from mlx_transformer import Transformer
from mlx_transformer.commands.models import open_model
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

call = pytest.fixture(caller)

SIZES = dict(architecture="decoder", encoder_layers=0, decoder_layers=2, tie_embeddings="target-output", dropout=0.0)
SIZES |= dict(vocab_size=40, d_model=16, heads=4, d_ff=24, max_positions=40)
KINDS = {
    "rotary": {"positions": "rotary", "key_value_heads": 2, "layer_pattern": [{"window": 5}, {}], "score_cap": 4.0},
    "learned": {"positions": "learned"},
    "sinusoidal": {},
    "relative": {"positions": "relative"},
}
REQUESTS = [
    {},
    {"beam": 3, "n_best": 2},
    {"sample": True, "seed": 4, "top_p": 0.8, "temperature": 1.3},
    {"beam": 2, "repetition_penalty": 1.3, "max_new_tokens": 20},
    {"no_repeat_ngram": 2, "repetition_penalty": 1.5, "min_new_tokens": 8},
    {"banned_sequences": [[7, 9], [5, 6, 7]], "suppressed": [11], "forced_first": [13], "max_new_tokens": 9},
    {"end_ids": [20, 21], "beam": 4, "length_penalty": 0.0},
]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 40, length).tolist() for length in (1, 2, 7, 12, 40)]


@pytest.fixture(scope="module", params=thinned(KINDS, 3))
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    config = TransformerConfig(**SIZES, **KINDS[request.param])
    save_checkpoint(folder / "model", config, random_weights(config, 3))
    file = export_search(folder / "model", folder / "model.onnx", target="cpu")
    return Transformer.load(folder / "model"), SearchModel(file, threads=1)


def equal(results, expected) -> None:
    assert [[h.ids for h in row] for row in results] == [[h.ids for h in row] for row in expected]
    for row, other in zip(results, expected, strict=True):
        np.testing.assert_allclose([h.score for h in row], [h.score for h in other], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_finds_what_mlx_finds(both, options) -> None:
    model, graph = both
    rows = prompts() if "max_new_tokens" not in options and "min_new_tokens" not in options else prompts()[:-1]
    equal(graph.search(rows, **options), model.search(rows, **options))


def test_a_batch_changes_nothing(both) -> None:
    _, graph = both
    equal(graph.search(prompts(), beam=2), graph.search(prompts(), beam=2, batch_tokens=1))


def test_prompts_are_padded_on_either_side(both) -> None:
    model, graph = both
    ids, mask = np.zeros((3, 9), np.int64), np.zeros((3, 9), np.int64)
    for row, (length, at) in enumerate(((9, 0), (4, 5), (4, 0))):
        ids[row, at : at + length], mask[row, at : at + length] = prompts()[3][:length], 1
    feeds = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": np.array([6])}
    sequences, lengths, _ = graph.session.run(["sequences", "lengths", "scores"], feeds)
    found = [row[0, : count[0]].tolist() for row, count in zip(sequences, lengths, strict=True)]
    assert found == model.generate([prompts()[3][:9], *[prompts()[3][:4]] * 2], max_new_tokens=6)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A model that chats, its folder and its file."""
    folder = write_chat_model(tmp_path_factory.mktemp("chats"), "smollm2")
    export_search(folder / "model", folder / "model.onnx")
    return folder


def test_texts_and_chats_are_the_folders(chats, call) -> None:
    file, folder = open_model(chats / "model.onnx"), OnnxTransformer(chats / "onnx")
    said = [{"role": "user", "content": "Hello there"}]
    for options in ({}, {"beam": 2}, {"sample": True, "seed": 3}):
        given = {"max_new_tokens": 7, **options}
        assert file.complete(["once", "upon a"], **given) == folder.complete(["once", "upon a"], **given)
        assert file.chat(said, **given) == folder.chat(said, **given)
    limits: list[int] = []
    assert "".join(file.stream_chat(said, max_new_tokens=7, on_limit=limits.append)) == folder.chat(
        said, max_new_tokens=7
    )
    assert limits == [7]
    for command in (["generate", "once upon"], ["chat", "Hello there"]):
        verb, *rest = command
        answers = [call(verb, chats / name, *rest, "--max-new-tokens", "6") for name in ("model.onnx", "onnx")]
        assert answers[0][:2] == answers[1][:2]
        assert answers[0][0] == 0


def test_what_a_file_can_not(chats, call, tmp_path) -> None:
    file = open_model(chats / "model.onnx")
    for asked, message in (
        (lambda: file.search([[3]], candidates=[[4]]), "candidates: only an encoder-decoder model takes them"),
        (lambda: list(file.stream("once")), "gives only whole lines"),
        (lambda: file.perplexity(["once upon"]), "gives no log-probabilities: export a folder"),
        (
            lambda: export_search(chats / "model", tmp_path / "text.onnx", text=True),
            "text in a graph needs a tokenizer",
        ),
    ):
        with pytest.raises(UserError, match=message):
            asked()
    refused(call("web", chats / "model.onnx", "-o", tmp_path / "page"), "to chat, export the decoder as a folder")


TEXTS = ["hello there", "x", "", " leading", "Grüße, 東京 <|im_end|>", "a\nb\n", "  two  spaces 123", "</s> <s>"]


@pytest.mark.parametrize("kind", ["own", "gpt2"])
def test_text_goes_in_and_comes_out(kind, call, tmp_path) -> None:
    pytest.importorskip("onnxruntime_extensions", reason="pip install -e '.[text]'")
    text = makers_json("gpt2") if kind == "gpt2" else Tokenizer.train(["the cat sat", "on a mat"], 300).to_json()
    known, end = Tokenizer(text), json.loads(text)["added_tokens"][0]["id"]
    ids = {"pad_id": 5, "bos_id": end, "eos_id": end} if kind == "gpt2" else {}
    config = TransformerConfig(**{**SIZES, "vocab_size": known.vocab_size, "decoder_layers": 1, **ids})
    save_checkpoint(tmp_path / "model", config, random_weights(config, 3), text)
    file = export_search(tmp_path / "model", tmp_path / "text.onnx", text=True)
    model, graph = Transformer.load(tmp_path / "model"), open_model(file)
    for options in ({}, {"beam": 2}, {"sample": True, "seed": 5}):
        given = {"max_new_tokens": 8, **options}
        found, expected = graph.complete(TEXTS, **given), model.complete(TEXTS, **given)
        assert found == [text.replace("\0", "") for text in expected], "a graph's strings hold no NUL"
    whole = model.complete("once", max_new_tokens=8)
    assert graph.complete("once", stop=[whole[3]], max_new_tokens=8) == whole.partition(whole[3])[0]
    assert call("generate", file, "once", "--max-new-tokens", "8")[:2] == (0, f"{whole}\n")
    for asked, message in (
        (lambda: graph.generate([[3]]), "takes text, not ids: call complete, or export it without text"),
        (lambda: graph.chat([{"role": "user", "content": "x"}]), "takes text, in which a template's tokens are text"),
        (lambda: graph.completions(["x"], scored=True), "shows no tokens"),
        (lambda: graph.complete("a\0b"), "holds a NUL character"),
    ):
        with pytest.raises(UserError, match=message):
            asked()


def test_validate_proves_it_and_triton_takes_it(chats, call, tmp_path) -> None:
    status, out, _ = call("validate", chats / "model", chats / "model.onnx")
    assert status == 0
    assert out.startswith("validate: equal")
    folder = export_triton(chats / "model", tmp_path / "triton")
    assert SearchModel(folder / "1" / "model.onnx").generate([[5, 6]], max_new_tokens=3) == open_model(
        chats / "model.onnx"
    ).generate([[5, 6]], max_new_tokens=3)
    text = (folder / "config.pbtxt").read_text()
    assert text.count("  name: ") == 5, "two inputs, three outputs"
