"""`to-marian` writes what was imported byte for byte, and other models of its network from their numbers and scales."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from combined import thinned
from marian_checks import SOURCES, TARGETS, model_file, network
from marian_models import KINDS, STUDENT, write_model
from small_models import random_weights

from mlx_transformer import Tokenizer, cli
from mlx_transformer.convert import import_marian, to_marian
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.int8_scales import INT8_SCALES, ProductScales, read_int8_scales
from mlx_transformer.core.shortlist import Shortlist, read_shortlist, shortlist_bytes
from mlx_transformer.families.marian_files.items import read_bin
from mlx_transformer.system.errors import UserError


@pytest.mark.fast("student", "pre-norm")
@pytest.mark.parametrize("kind", thinned([*KINDS][::-1], 2))
def test_a_file_of_integers_comes_back_byte_for_byte(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", KINDS[kind], integers=True)
    import_marian(folder, tmp_path / "ours")
    assert to_marian(tmp_path / "ours", tmp_path / "back") == []
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names | {"model.npz", "README.md"}
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes(), name
    import_marian(tmp_path / "back" / "model.npz", tmp_path / "floats")
    ours, floats = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / "floats")
    assert all(np.array_equal(array, floats.tensor(name)) for name, array in ours.tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_comes_back(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", KINDS[kind])
    import_marian(folder, tmp_path / "ours")
    assert to_marian(tmp_path / "ours", tmp_path / "back") == [
        "no .bin of integers (the checkpoint has no int8_scales.json: give text with --calibrate)"
    ]
    for path in folder.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name


def bare(checkpoint: Path, out: Path) -> Path:
    """The same checkpoint without the files that it came from, as if it had been trained here."""
    shutil.copytree(checkpoint, out)
    keep = ("config.json", "model.safetensors", INT8_SCALES)
    for path in out.iterdir():
        if path.name not in keep and not path.name.endswith("tokenizer.json"):
            path.unlink()
    return out


@pytest.mark.fast("student")
@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_integers_are_those_of_the_scales(kind: str, tmp_path: Path) -> None:
    """Without its original file a model is written from its numbers, and is the same but for what means nothing."""
    folder = write_model(tmp_path / "theirs", KINDS[kind], integers=True)
    import_marian(folder, tmp_path / "ours")
    assert to_marian(bare(tmp_path / "ours", tmp_path / "bare"), tmp_path / "back") == []
    before = {item.name: item for item in read_bin(model_file(folder))}
    after = {item.name: item for item in read_bin(tmp_path / "back" / "model.intgemm.alphas.bin")}
    assert before.keys() == after.keys()
    for name, item in before.items():
        if name != "special:model.yml":
            assert np.array_equal(item.stored(), after[name].stored()), name
            assert (item.type, item.multiplier, len(item.data)) == (
                *(after[name].type, after[name].multiplier, len(after[name].data)),
            )
    judge, again = network(folder), network(tmp_path / "back")
    expected = judge.logits(SOURCES[0], TARGETS[0])
    np.testing.assert_allclose(again.logits(SOURCES[0], TARGETS[0]), expected, rtol=1e-11, atol=1e-11)
    import_marian(tmp_path / "back" / "model.intgemm.alphas.bin", tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").fingerprint == Tokenizer.load(tmp_path / "ours").fingerprint


def test_changed_numbers_are_rounded_by_their_largest(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT, integers=True)
    import_marian(folder, tmp_path / "ours")
    opened = open_checkpoint(tmp_path / "ours")
    name = "encoder.layers.0.feed_forward.up_proj.weight"
    weights = {**dict(opened.tensors()), name: random_weights(opened.config)[name]}
    scales = read_int8_scales(opened.folder, opened.config)
    assert scales is not None
    free = {n: ProductScales(entry.activation) for n, entry in scales.products.items()}
    texts = {INT8_SCALES: dataclasses.replace(scales, products=free).json()}
    save_checkpoint(tmp_path / "new", opened.config, weights, opened.tokenizer_json(), texts=texts)
    to_marian(tmp_path / "new", tmp_path / "back")
    items = {item.name: item for item in read_bin(tmp_path / "back" / "model.intgemm.alphas.bin")}
    item = items["encoder_l1_ffn_W1"]
    assert item.multiplier == np.float32(127) / np.abs(weights[name]).max()
    assert np.abs(item.stored()).max() == 127
    assert np.array_equal(item.stored(), np.rint(weights[name].T * item.multiplier))


def test_a_changed_model_isnt_written_from_the_old_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT, integers=True)
    import_marian(folder, tmp_path / "ours")
    opened = open_checkpoint(tmp_path / "ours")
    weights = dict(opened.tensors())
    weights["output_proj.bias"][3] += 1
    kept = {path.name: path for path in opened.folder.iterdir()}
    copies = {
        name: path for name, path in kept.items() if name not in ("config.json", "model.safetensors", "manifest.json")
    }
    copies = {name: path for name, path in copies.items() if name != "tokenizer.json"}
    save_checkpoint(tmp_path / "new", opened.config, weights, opened.tokenizer_json(), texts=copies)
    to_marian(tmp_path / "new", tmp_path / "back")
    before, after = read_bin(model_file(folder)), read_bin(tmp_path / "back" / "model.test.intgemm.alphas.bin")
    assert [a.name for a, b in zip(before, after, strict=True) if not np.array_equal(a.stored(), b.stored())] == [
        "decoder_ff_logit_out_b"
    ]


TRAINED = TransformerConfig(vocab_size=40, d_model=16, heads=2, d_ff=16, encoder_layers=1, decoder_layers=1)


def test_what_marian_lacks_is_refused_at_once(tmp_path: Path) -> None:
    import_marian(write_model(tmp_path / "theirs", STUDENT), tmp_path / "ours")
    opened = open_checkpoint(tmp_path / "ours")
    config = dataclasses.replace(opened.config, positions="sinusoidal", norm_epsilon=1e-5, activation="gelu")
    save_checkpoint(tmp_path / "new", config, dict(opened.tensors()), opened.tokenizer_json())
    with pytest.raises(
        UserError, match=r"activation='gelu'.*norm_epsilon=1e-05, Marian has 1e-06.*positions='sinusoidal'"
    ):
        to_marian(tmp_path / "new", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_another_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["one two three"] * 3, vocab_size=270)
    config = dataclasses.replace(TRAINED, vocab_size=tokenizer.vocab_size, source_vocab_size=tokenizer.vocab_size)
    save_checkpoint(tmp_path / "ours", config, random_weights(config), tokenizer.to_json())
    save_checkpoint(tmp_path / "none", config, random_weights(config))
    for name in ("ours", "none"):
        with pytest.raises(UserError, match=r"its tokenizer is none that Marian reads: .*--unk_id=1$"):
            to_marian(tmp_path / name, tmp_path / "back")


def test_a_start_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    import_marian(write_model(tmp_path / "theirs", STUDENT), tmp_path / "ours")
    opened = open_checkpoint(tmp_path / "ours")
    weights = dict(opened.tensors())
    weights["embedding.weight"][29] = 1
    save_checkpoint(tmp_path / "new", opened.config, weights, opened.tokenizer_json())
    with pytest.raises(
        UserError, match=r"decoders start from zeros, and row 29 of embedding\.weight has other numbers"
    ):
        to_marian(tmp_path / "new", tmp_path / "back")


def lists(count: int, largest: int) -> Shortlist:
    """Of each source piece one target piece, the last one's the largest; none of what is behind them."""
    ids = np.array([*range(28), largest], np.uint32)
    return Shortlist(2, 1, np.minimum(np.arange(count + 1), len(ids)).astype(np.uint64), ids)


@pytest.mark.parametrize("count", [29, 30])
def test_a_shortlist_goes_with_it(count: int, tmp_path: Path) -> None:
    """The row behind the vocabulary, which a list of our own has, is none of Marian's."""
    import_marian(write_model(tmp_path / "theirs", STUDENT, integers=True), tmp_path / "ours")
    folder = bare(tmp_path / "ours", tmp_path / "bare")
    (tmp_path / "list").write_bytes(shortlist_bytes(lists(count, 27)))
    cli.main(["to-marian", str(folder), str(tmp_path / "back"), "--shortlist", str(tmp_path / "list")])
    found = read_shortlist(tmp_path / "back" / "lex.2.1.s2t.bin")
    assert (found.first, found.best, found.offsets.tolist()) == (2, 1, [*range(30)])
    assert "shortlist:\n  - lex.2.1.s2t.bin\n" in (tmp_path / "back" / "config.yml").read_text(encoding="utf-8")
    import_marian(tmp_path / "back", tmp_path / "again")
    assert (tmp_path / "again" / "lex.2.1.s2t.bin").is_file()


@pytest.mark.parametrize(("count", "largest"), [(28, 27), (29, 29)])
def test_a_shortlist_of_other_vocabularies_is_refused(count: int, largest: int, tmp_path: Path) -> None:
    import_marian(write_model(tmp_path / "theirs", STUDENT, integers=True), tmp_path / "ours")
    with pytest.raises(UserError, match=rf"of other vocabularies: {count} source pieces, .* up to {largest}; .* 29 "):
        to_marian(tmp_path / "ours", tmp_path / "back", shortlist=lists(count, largest))
    assert not (tmp_path / "back").exists()


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "theirs", STUDENT, integers=True)
    cli.main(["import", str(model_file(folder)), str(tmp_path / "ours")])
    cli.main(["to-marian", str(tmp_path / "ours"), str(tmp_path / "back")])
    with pytest.raises(SystemExit):
        cli.main(["to-marian", str(tmp_path / "ours"), str(tmp_path / "back")])
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{tmp_path / 'ours'}: imported: encoder-decoder, ")
    assert shown.out.endswith(f" parameters in float32, with its tokenizer\n{tmp_path / 'back'}: written\n")
    assert "holds another Marian folder; choose another folder, or --force" in shown.err
    settings = json.loads((tmp_path / "ours" / "marian.json").read_text())
    assert settings["generation"] == {"beam-size": 1, "max-length-factor": 2.5}
