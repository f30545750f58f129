"""The quality gate: what it measures, that it refuses and leaves nothing behind, and what it judges on by itself."""

import json

import numpy as np
import onnxruntime as ort
import pytest
from combined import thinned
from random_models import random_weights
from small_models import alone, encoder_decoder, write_text_model

from export import OnnxTransformer, export_onnx
from export.package import quality
from export.package.quality import LIMITS, Limits, Quality, nearest, recorded
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.heads import EMBEDDING
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.data import built_in
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

LINES = ["one small dog", "two dogs and a cat", "a cat", "the house of the cat", "one", "and two"]
NEVER = Limits(1.01, 100.0, 100.0, 0.0)
ALWAYS = Limits(0.0, 100.0, 100.0, 100.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tokenizer = Tokenizer.train(LINES, vocab_size=270)
    values = {**encoder_decoder("paper").to_dict(), "d_model": 48, "d_k": 12, "d_v": 12}
    values |= {"encoder_layers": 1, "decoder_layers": 1}
    values |= {"vocab_size": tokenizer.vocab_size, "source_vocab_size": tokenizer.vocab_size}
    config = TransformerConfig(**values)
    return save_checkpoint(folder / "model", config, random_weights(config, 4), tokenizer.to_json())


@pytest.fixture
def text(tmp_path):
    """(source, reference) as files."""
    for name, lines in (("source", LINES), ("reference", LINES[::-1])):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "source", tmp_path / "reference"


@pytest.mark.parametrize("target", thinned(["cpu", "portable"], 2))
def test_what_is_recorded_is_what_the_package_does(checkpoint, text, tmp_path, target, monkeypatch):
    monkeypatch.setitem(LIMITS, "int4", ALWAYS)
    gate = dict(zip(("gate_source", "gate_reference"), text, strict=True))
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision=["float32", "int4"], target=target, **gate)
    (judged,) = recorded(folder)
    assert (judged.precision, judged.text, judged.sentences) == ("int4", str(text[0]), len(LINES))
    narrow, wide = (OnnxTransformer(folder, precision=p).translate(LINES) for p in ("int4", "float32"))
    assert judged.same == np.mean([a == b for a, b in zip(narrow, wide, strict=True)])
    assert 0 < judged.agreement < 1
    assert judged.exact_float32 == 0.0
    assert str(judged).startswith(f"int4: {judged.agreement:.2%} of the best tokens")


def test_agreement_is_that_of_the_best_tokens(checkpoint, tmp_path):
    """Counted by hand on one sentence, position by position."""
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision=["float32", "int4"])
    (judged,) = quality.judge(folder, folder, ["int4"], quality.Text(LINES[3:4], None, "one line"))
    wide, narrow = (OnnxTransformer(folder, precision=p) for p in ("float32", "int4"))
    rows = wide.translator.tokenizer.encode_batch(LINES[3:4])
    target = [[wide.config.bos_id, *wide.generate(rows)[0]][: wide.config.max_positions]]
    best = [model.decode(target, model.encode(rows)).argmax(-1)[0] for model in (wide, narrow)]
    assert judged.agreement == np.mean(best[0] == best[1])
    assert (judged.bleu, judged.exact_float32) == (None, None)
    assert judged.same == float(wide.generate(rows) == narrow.generate(rows))


def test_bfloat16_of_target_cuda_is_judged_where_cuda_is(checkpoint, text, tmp_path):
    """No CPU computes in it."""
    said, precisions = [], ["float16", "bfloat16"]
    gate = {"gate_source": text[0], "accept_loss": True, "log": said.append}
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision=precisions, target="cuda", **gate)
    here = "CUDAExecutionProvider" in ort.get_available_providers()
    assert [quality.precision for quality in recorded(folder)] == precisions[: 1 + here]
    missing = "bfloat16: not judged: target cuda has it for CUDAExecutionProvider alone, which isn't here"
    assert (missing in said) != here


@pytest.mark.slow
def test_progress_is_told(checkpoint, text, tmp_path, monkeypatch):
    """Of float32 and of each judged precision, up to the whole."""
    for precision in ("int4", "int8"):
        monkeypatch.setitem(LIMITS, precision, ALWAYS)
    told = []
    precisions = ["float32", "int4", "int8"]
    watch = lambda *entry: told.append(entry)  # noqa: E731
    export_onnx(checkpoint, tmp_path / "onnx", precision=precisions, gate_source=text[0], watch=watch)
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == 1
    assert list(dict.fromkeys(name for _, name in told)) == precisions


def test_a_package_beyond_the_limits_is_refused_and_nothing_is_left(checkpoint, text, tmp_path, monkeypatch):
    for precision in ("int8", "int4"):
        monkeypatch.setitem(LIMITS, precision, NEVER)
    out = tmp_path / "onnx"
    with pytest.raises(UserError, match=r"not written: int8: .* of the best tokens .*; accept_loss=True writes it"):
        export_onnx(checkpoint, out, precision="int8", gate_source=text[0])
    with pytest.raises(UserError, match=r"not written: int8: .*; force=True only replaces a model"):
        export_onnx(checkpoint, out, precision="int8", gate_source=text[0], force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "reference"}
    export_onnx(checkpoint, out, precision="int8", gate_source=text[0], accept_loss=True)
    assert recorded(out)[0].problems
    with pytest.raises(UserError, match="not written"):
        export_onnx(checkpoint, out, precision="int4", gate_source=text[0], force=True)
    assert recorded(out)[0].precision == "int8"  # the earlier export is still there


def test_limits_are_wider_on_few_sentences():
    def problems(sentences, agreement=1.0, bleu=20.0, exact=50.0):
        return Quality("int8", "t", sentences, agreement, 1.0, bleu, 20.2, exact, 50.0).problems

    assert not problems(1000)
    assert problems(1000, bleu=19.8) == ["BLEU falls from 20.20 to 19.80, the limit is 0.30 points"]
    assert not problems(250, bleu=19.8)
    assert "exact match falls" in problems(1000, exact=48.9)[0]
    assert "the limit is 95%" in problems(1000, agreement=0.94)[0]


def test_float32_alone_is_not_judged(checkpoint, text, tmp_path):
    assert not recorded(export_onnx(checkpoint, tmp_path / "onnx", gate_source=text[0]))


@pytest.mark.slow
def test_the_built_in_corpus_where_the_run_names_it(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(LIMITS, "int8", ALWAYS)
    monkeypatch.setattr(quality, "PHRASES", 6)
    assert not recorded(export_onnx(checkpoint, tmp_path / "onnx", precision="int8"))
    run = checkpoint.parent / "run.json"
    recipe = {"data": {"corpus": "cldr:en-de", "train_pairs": 3000}, "training": {"seed": 2}}
    run.write_text(json.dumps({"recipe": recipe}), encoding="utf-8")
    try:
        (judged,) = recorded(export_onnx(checkpoint, tmp_path / "onnx", precision="int8", force=True))
    finally:
        run.unlink()
    assert (judged.text, judged.sentences) == ("cldr:en-de, held out", 6)
    assert judged.bleu is not None


def test_phrases_are_held_out_of_the_run_itself(checkpoint):
    """Another seed or size draws another corpus, whose held-out phrases the run may have learned from."""
    run = checkpoint.parent / "run.json"
    recipe = {"data": {"corpus": "sentences:en-de", "train_pairs": 60_000}, "training": {"seed": 7}}
    run.write_text(json.dumps({"recipe": recipe}), encoding="utf-8")
    try:
        text = quality.gate_text(open_checkpoint(checkpoint), ["int8"], None, None)
    finally:
        run.unlink()
    corpus = built_in.build("sentences:en-de", seed=7)
    assert text is not None
    assert text.source == list(corpus.held_out.source[: quality.PHRASES])
    assert not set(text.source) & set(corpus.train.source)
    assert set(built_in.build("sentences:en-de").held_out.source) & set(corpus.train.source)


def test_a_corpus_that_is_not_built_in_any_more_is_not_judged_by(checkpoint):
    run, said = checkpoint.parent / "run.json", []
    recipe = {"data": {"corpus": "cldr:fr-ja", "train_pairs": 60_000}, "training": {"seed": 1}}
    run.write_text(json.dumps({"recipe": recipe}), encoding="utf-8")
    try:
        text = quality.gate_text(open_checkpoint(checkpoint), ["int8"], None, None, log=said.append)
    finally:
        run.unlink()
    assert text is None
    assert said[0].startswith("int8: not judged; --gate-source FILE")


def test_what_cannot_be_judged_is_said(checkpoint, text, tmp_path):
    with pytest.raises(UserError, match="needs its source"):
        export_onnx(checkpoint, tmp_path / "onnx", precision="int8", gate_reference=text[1])
    with pytest.raises(UserError, match="nowhere"):
        export_onnx(checkpoint, tmp_path / "onnx", precision="int8", gate_source=tmp_path / "nowhere")
    config = alone("paper", "decoder")
    decoder = save_checkpoint(tmp_path / "decoder", config, random_weights(config, 1))
    with pytest.raises(UserError, match="has no tokenizer, and the quality gate compares texts"):
        export_onnx(decoder, tmp_path / "onnx", precision="int8", gate_source=text[0])
    assert not (tmp_path / "onnx").exists()


def test_neighbours_are_those_of_the_smallest_angles():
    vectors = np.array([[1, 0], [10, 1], [0, 3], [-1, 0.1]], np.float32)
    assert [each.tolist() for each in nearest(vectors, 2)] == [[1, 2], [0, 2], [3, 1], [2, 1]]
    with pytest.raises(UserError, match="neighbours are compared of at least two texts"):
        nearest(vectors[:1])


def test_vectors_of_texts_are_judged_by_their_neighbours(tmp_path):
    folder = write_text_model(tmp_path, architecture="encoder", decoder_layers=0)
    (folder / "model" / EMBEDDING).write_text(TextEmbedding(normalize=True).json())
    words = "one two three four five six größer 東京".split()
    lines = [f"{a} {b}" for a in words for b in words]
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    told = []
    options = {"precision": ["float32", "int8"], "gate_source": tmp_path / "text", "accept_loss": True}
    export_onnx(folder / "model", tmp_path / "out", log=told.append, **options)
    (quality,) = recorded(tmp_path / "out")
    wide, narrow = (OnnxTransformer(tmp_path / "out", precision=p) for p in ("float32", "int8"))
    kept = [np.isin(*pair).mean() for pair in zip(*(nearest(m.embed(lines)) for m in (wide, narrow)), strict=True)]
    assert (quality.neighbours, quality.sentences, quality.agreement) == (True, 64, pytest.approx(np.mean(kept)))
    assert 0.3 < quality.agreement < 1
    assert quality.same == pytest.approx(np.mean([share == 1 for share in kept]))
    assert told[-1].startswith(f"int8: {quality.agreement:.2%} of the ten nearest neighbours and ")
    with pytest.raises(UserError, match="only translations have a reference"):
        export_onnx(folder / "model", tmp_path / "o", **options, gate_reference=tmp_path / "text")
