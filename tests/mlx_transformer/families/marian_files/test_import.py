"""`import` of Marian's own files gives the network that they mean.

The judge is `export/validate/origin/marian.py`, which reads the files by their own names, in float64.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from combined import combined
from marian_checks import SOURCES, TARGETS, model_file, network
from marian_models import KINDS, SIZES, STUDENT, bin_bytes, model_items, npz_bytes, shortlist, vocabulary, write_model

from export import OnnxTransformer, SearchModel, export_onnx, export_search
from export.validate.origin.marian import MarianNetwork
from export.validate.reference import Reference
from export.validate.reference import network as reference_module
from mlx_transformer import Tokenizer, Transformer
from mlx_transformer.convert import import_marian
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.int8_scales import INT8_SCALES, read_int8_scales
from mlx_transformer.families.marian_files.conversion import read_model
from mlx_transformer.families.marian_files.items import Item, float_item, read_bin
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.sentencepiece import sentencepiece_bytes


@pytest.fixture
def exact_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions in float64 in the reference, which rounds them like every runtime."""

    def sinusoid(positions: np.ndarray, d_model: int, layout: str) -> np.ndarray:
        assert layout == "sinusoidal_concat"
        frequencies = 10000.0 ** (-np.arange(d_model // 2) / (d_model // 2 - 1))
        angle = positions[..., None] * frequencies
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)

    monkeypatch.setattr(reference_module, "sinusoid", sinusoid)


def difference(checkpoint: Path, judge: MarianNetwork, **changes: Any) -> float:
    """The largest difference of logits that are not barred, in units of theirs."""
    opened = open_checkpoint(checkpoint)
    config = dataclasses.replace(opened.config, **changes)
    reference, largest = Reference(config, dict(opened.tensors())), 0.0
    for source, target in zip(SOURCES, TARGETS, strict=True):
        expected = judge.logits(source, target)
        got = reference(np.array([source]), np.array([[config.bos_id, *target]]))[0]
        assert (got[:, expected.shape[1] :] < -5e3).all()
        scale = np.sqrt(np.mean(expected**2))
        largest = max(largest, float(np.abs(got[:, : expected.shape[1]] - expected).max() / scale))
    return largest


@pytest.mark.usefixtures("exact_positions")
@pytest.mark.parametrize(("kind", "integers"), combined(KINDS, [False, True]))
def test_the_network_is_marians(kind: str, integers: bool, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", KINDS[kind], integers=integers)
    assert import_marian(folder, tmp_path / "ours") == []
    assert difference(tmp_path / "ours", network(folder)) < 1e-12


@pytest.mark.usefixtures("exact_positions")
@pytest.mark.parametrize(
    "changes",
    [
        dict(norm_epsilon=1e-5),
        dict(bos_id=0, eos_id=2),
        dict(heads=2),
        dict(activation="silu"),
        dict(scale_embeddings=False),
    ],
    ids=str,
)
def test_a_wrong_choice_is_seen(changes: dict[str, Any], tmp_path: Path) -> None:
    """Such as </s>'s row as the start, of which the texts say little."""
    folder = write_model(tmp_path / "theirs", STUDENT, integers=True)
    import_marian(folder, tmp_path / "ours")
    changes = {**changes, "d_k": 8, "d_v": 8, "key_value_heads": 2} if "heads" in changes else changes
    assert difference(tmp_path / "ours", network(folder), **changes) > 1e-8


def test_frequencies_are_tensor2tensors(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT)
    import_marian(folder, tmp_path / "ours")
    assert difference(tmp_path / "ours", network(folder)) < 1e-5
    assert difference(tmp_path / "ours", network(folder), positions="sinusoidal_halves") > 1e-3


@pytest.mark.fast("student", "two vocabularies", "pre-norm")
@pytest.mark.parametrize("kind", KINDS)
def test_mlx_writes_what_marian_does(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", KINDS[kind], seed=2, integers=True)
    import_marian(folder, tmp_path / "ours")
    model, judge = Transformer.load(tmp_path / "ours"), network(folder)
    pieces, shared = KINDS[kind]["dim-vocabs"], model.config.one_embedding
    lists = shortlist(*pieces)
    own = [lists.candidates(source, pieces[1], shared).tolist() for source in SOURCES]
    for among in (own, [None] * len(SOURCES)):  # as its settings say, and exact
        written = model.generate(SOURCES, max_new_tokens=12, suppressed=[])
        assert written == [judge.translate(*row) for row in zip(SOURCES, [12] * len(SOURCES), among, strict=True)]
        model.shortlist = None
    for source, target in zip(SOURCES, TARGETS, strict=True):
        expected = judge.logits(source, target)
        got = np.array(model(mx.array([source]), mx.array([[model.config.bos_id, *target]])))[0]
        np.testing.assert_allclose(got[:, : expected.shape[1]], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_scales_are_the_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT, integers=True)
    import_marian(folder, tmp_path / "ours")
    items = {item.name: item for item in read_bin(model_file(folder))}
    opened = open_checkpoint(tmp_path / "ours")
    scales = read_int8_scales(opened.folder, opened.config)
    assert scales is not None
    forget = scales.products["decoder.layers.1.self_attention.forget_proj.weight"]
    assert forget.activation == items["decoder_l2_rnn_Wf_QuantMultA"].numbers()
    assert forget.weight == items["decoder_l2_rnn_Wf"].multiplier
    table = scales.products["embedding.weight"]
    assert (table.activation, table.weight) == (items["none_QuantMultA"].numbers(), items["Wemb"].multiplier)
    for name, entry in scales.products.items():
        assert entry.weight is not None
        steps = opened.tensor(name) * entry.weight
        assert np.abs(steps - np.rint(steps)).max() < 1e-4
    rounded = np.rint(opened.tensor("decoder.layers.1.self_attention.forget_proj.weight") * forget.weight)
    assert np.array_equal(rounded.T, items["decoder_l2_rnn_Wf"].stored())


def without_scales(items: list[Item]) -> list[Item]:
    return [item for item in items if item.name != "encoder_l1_self_Wq_QuantMultA"]


def test_a_file_without_a_scale_is_told(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT, integers=True)
    path = model_file(folder)
    path.write_bytes(bin_bytes(without_scales(read_bin(path))))
    assert import_marian(folder, tmp_path / "ours") == [
        "no int8_scales.json (the file has no scales of activations, or not all)"
    ]
    assert not (tmp_path / "ours" / INT8_SCALES).exists()


def test_one_row_more_is_padding_and_start(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", KINDS["two vocabularies"])
    import_marian(folder, tmp_path / "ours")
    opened = open_checkpoint(tmp_path / "ours")
    c = opened.config
    assert (c.vocab_size, c.source_vocab_size, c.pad_id, c.bos_id, c.eos_id) == (32, 32, 31, 31, 0)
    assert not opened.tensor("source_embedding.weight")[31].any()
    assert not opened.tensor("target_embedding.weight")[29:].any()
    assert opened.tensor("output_proj.bias")[29:].tolist() == [-1e4, -1e4, -1e4]
    tokenizer = Tokenizer.load(tmp_path / "ours")
    assert (tokenizer.pad_id, tokenizer.source.pad_id, tokenizer.vocab_size) == (31, 31, 32)
    assert tokenizer.decode(tokenizer.encode("the thin end.")) == "the thin end."


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT, seed=4)
    import_marian(folder, tmp_path / "ours")
    model, tokenizer = Transformer.load(tmp_path / "ours"), Tokenizer.load(tmp_path / "ours")
    (expected,) = model.generate(tokenizer.encode_batch(["the rain is on."]))
    assert model.translate(["the rain is on."]) == [tokenizer.decode(expected)]


def replaced(folder: Path, change: Any) -> None:
    path = model_file(folder)
    path.write_bytes(npz_bytes(change(read_model(path))))


def renamed(items: list[Item]) -> list[Item]:
    return [
        dataclasses.replace(item, name="context_enc2_l1_self_Wq") if item.name.endswith("l1_self_Wq") else item
        for item in items
    ]


def transposed(items: list[Item]) -> list[Item]:
    return [float_item(i.name, i.numbers().T) if i.name == "encoder_l1_ffn_W1" else i for i in items]


def test_tensors_that_dont_fit_are_all_listed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT)
    replaced(folder, lambda items: transposed(renamed(items)))
    with pytest.raises(UserError) as caught:
        import_marian(folder, tmp_path / "ours")
    message = str(caught.value)
    assert "missing encoder_l1_self_Wq (16, 16)" in message
    assert "unknown context_enc2_l1_self_Wq (16, 16)" in message
    assert "encoder_l1_ffn_W1 is (32, 16), expected (16, 32)" in message
    assert not (tmp_path / "ours").exists()


def test_older_names_of_the_output(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", KINDS["untied"])
    import_marian(folder, tmp_path / "ours")
    wt, w = "decoder_ff_logit_out_Wt", "decoder_ff_logit_out_W"
    replaced(folder, lambda items: [float_item(w, i.numbers().T) if i.name == wt else i for i in items])
    import_marian(folder, tmp_path / "older")
    name = "output_proj.weight"
    assert np.array_equal(
        open_checkpoint(tmp_path / "older").tensor(name), open_checkpoint(tmp_path / "ours").tensor(name)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: model_file(folder).unlink(), "holds no Marian model"),
        (
            lambda folder: (
                shutil.copy(model_file(folder), folder / "model2.npz") and (folder / "config.test.yml").unlink()
            ),
            "holds several models: model.npz, model2.npz; give one",
        ),
        (
            lambda folder: (folder / "vocab.spm").write_bytes(sentencepiece_bytes(vocabulary(35))),
            "has 35 pieces, and the model 29",
        ),
        (lambda folder: (folder / "vocab.spm").write_bytes(b"x"), "damaged, or no SentencePiece model"),
        (lambda folder: (folder / "lex.50.50.test.s2t.bin").write_bytes(b"x"), "no shortlist of Marian's"),
        (
            lambda folder: (folder / "lex.50.50.test.s2t.bin").unlink(),
            "names the shortlist lex.50.50.test.s2t.bin, which isn't there; restore it, or take it out",
        ),
        (lambda folder: (folder / "config.test.yml").write_text("models:\n  - a\n b"), "line 3 of its options"),
        (
            lambda folder: replaced(folder, lambda items: model_items({**SIZES, "transformer-heads": 3})),
            "d_model=16 is not a multiple of heads=3",
        ),
    ],
)
def test_a_folder_that_isnt_whole_is_one_line(change: Any, message: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", SIZES)
    change(folder)
    with pytest.raises(UserError, match=message) as caught:
        import_marian(folder, tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ours").exists()


def test_names_in_settings_stay_in_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", SIZES)
    shutil.copy(folder / "vocab.spm", tmp_path / "other.spm")
    settings = folder / "config.test.yml"
    settings.write_text(settings.read_text().replace("vocab.spm", "../other.spm"))
    import_marian(folder, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "marian.json").read_text())["vocabularies"] == ["vocab.spm"]
    assert not (tmp_path / "ours" / "other.spm").exists()


def opus(folder: Path) -> None:
    """Two models that cut text, and a list of pieces that gives their ids, as Opus-MT's originals have them."""
    (folder / "vocab.spm").rename(folder / "source.spm")
    shutil.copy(folder / "source.spm", folder / "target.spm")
    (folder / "opus.vocab.yml").write_text('"</s>": 0\n"<unk>": 1\n')
    settings = folder / "config.test.yml"
    settings.write_text(settings.read_text().replace("vocab.spm", "opus.vocab.yml"))


@pytest.mark.parametrize("change", [lambda folder: (folder / "vocab.spm").unlink(), opus], ids=["none", "Opus-MT's"])
def test_without_a_vocabulary_the_model_takes_ids(change: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT)
    change(folder)
    (note,) = import_marian(folder, tmp_path / "ours")
    assert note.startswith("no tokenizer (")
    assert Transformer.load(tmp_path / "ours").generate(SOURCES)


BEAM_6 = {"beam": 6, "penalty_form": "length", "length_penalty": 0}


@pytest.mark.fast("beam-size: 4\\nnormalize: 0.8\\nword-penalty: 0.1\\n-expected3-notes3", "-expected0-notes0")
@pytest.mark.parametrize(
    ("more", "expected", "notes"),
    [
        ("", {"max_length_factor": 2.5, "suppressed": [1]}, []),
        ("allow-unk: true\n", {"max_length_factor": 2.5}, []),
        ("beam-size: 6\n", {**BEAM_6, "max_length_factor": 2.5, "suppressed": [1]}, []),
        (
            "beam-size: 4\nnormalize: 0.8\nword-penalty: 0.1\n",
            {**BEAM_6, "beam": 4, "length_penalty": 0.8, "max_length_factor": 2.5, "suppressed": [1]},
            ["word-penalty 0.1 left behind"],
        ),
    ],
)
def test_settings_of_the_search_come_along(
    more: str, expected: dict[str, Any], notes: list[str], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT)
    settings = folder / "config.test.yml"
    settings.write_text(settings.read_text().replace("beam-size: 1\n", "") + more)
    assert import_marian(folder, tmp_path / "ours") == notes
    path = tmp_path / "ours" / "generation.json"
    assert json.loads(path.read_text()) == {**expected, "shortlist": "lex.50.50.test.s2t.bin"}
    assert Transformer.load(tmp_path / "ours").generate(SOURCES)


def test_outputs_are_at_most_so_many_times_as_long_as_sources(tmp_path: Path) -> None:
    """Marian's rule, in every runtime and in the bare file; whatever a caller gives wins."""
    import_marian(write_model(tmp_path / "theirs", STUDENT), tmp_path / "ours")
    endless = {"min_new_tokens": 3, "suppressed": [0]}
    folder, file = (
        export_onnx(tmp_path / "ours", tmp_path / "onnx"),
        export_search(tmp_path / "ours", tmp_path / "a.onnx"),
    )
    search = SearchModel(file, threads=1)
    for model in (Transformer.load(tmp_path / "ours"), OnnxTransformer(folder, threads=1), search):
        lengths = [len(row) for row in model.generate(SOURCES, **endless)]
        assert lengths == [math.ceil(2.5 * len(row)) for row in SOURCES]
        assert {len(row) for row in model.generate(SOURCES, max_new_tokens=5, **endless)} == {5}
        lengths = [len(row) for row in model.generate(SOURCES, max_length_factor=0, **endless)]
        assert lengths == [len(row) + 50 for row in SOURCES]
    ids = np.array(SOURCES[:1])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "suppressed": np.array([0])}
    (found,) = search.session.run(["lengths"], given)
    assert found.tolist() == [[math.ceil(2.5 * ids.shape[1])]]


def test_a_shortlist_that_the_settings_do_not_name_is_kept_and_not_used(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT)
    settings = folder / "config.test.yml"
    named = "shortlist:\n    - lex.50.50.test.s2t.bin\n    - false\n"
    assert named in settings.read_text()
    settings.write_text(settings.read_text().replace(named, ""))
    import_marian(folder, tmp_path / "ours")
    assert (tmp_path / "ours" / "lex.50.50.test.s2t.bin").is_file()
    assert Transformer.load(tmp_path / "ours").shortlist is None


def test_settings_that_name_no_model_are_said_to_be_left(tmp_path: Path) -> None:
    """A training's own config lies beside the model: what it says of a search is how its validation was searched."""
    folder = write_model(tmp_path / "theirs", STUDENT)
    settings = folder / "config.test.yml"
    beside = folder / "config.of-the-training.yml"
    beside.write_text("beam-size: 12\n")
    assert import_marian(folder, tmp_path / "beside") == []
    settings.unlink()
    assert import_marian(folder, tmp_path / "ours") == [f"{beside.name} left behind: it has no line models:"]
    assert "beam" not in json.loads((tmp_path / "ours" / "generation.json").read_text())


def test_settings_that_no_search_takes_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT)
    settings = folder / "config.test.yml"
    settings.write_text(settings.read_text().replace("beam-size: 1", "beam-size: 0"))
    with pytest.raises(UserError, match=r"config\.test\.yml: .*beam"):
        import_marian(folder, tmp_path / "ours")
